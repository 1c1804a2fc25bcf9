"""What the host engine's work needs in memory: arithmetic on a model's shape, no engine imported.

per token of a language layer, saved for the backward (bytes are elements x itemsize; `wide` = at least float32)
    norms        2 x (input wide, normalised, scaled)                   2 wide + 4 hidden
    attention    query, output [heads x head_dim], key, value [kv_heads x head_dim], log-sum-exp [heads]
    mlp          gate, silu(gate), up, product                          4 ffn
head: one row of logits for a token, or the one number of a value or score head
per patch of a tower block
    norms as above; query, key, the fused projection that holds the value, output [6 hidden]; mlp 4 ffn; log-sum-exp
projector        norm, first linear's output, its GELU                  wide + 4 hidden

Of the last language layer a prefix needs keys and values only: one norm and the output projection's input are saved.
All figures are upper bounds for one prompt group; tests/test_host_sizes.py holds them against measured bytes.
"""

from __future__ import annotations

from rollplex.ir.spec import VisionSpec
from rollplex.ir.work import Work

ALIGN = 64  # a saved storage starts at a multiple of this in its pool
LOGIT_ROWS = 256  # rows of logits that exist at a time
STORAGES_A_LAYER = 20


def prefix_saved_bytes(work: Work) -> int:
    """Saved state of one attached prefix, kept or offloaded; with recompute only what checkpoints keep."""
    tower = _tower_saved(work) if work.vision_grad else 0
    rotary = 2 * work.prompt_tokens * work.spec.head_dim * work.itemsize
    if work.recompute:
        language = (work.spec.layers - 1) * work.prompt_tokens * work.spec.hidden * work.itemsize
    else:
        language = (work.spec.layers - 1) * work.prompt_tokens * layer_saved_bytes(work)
    return tower + language + rotary + work.prompt_tokens * _last_layer(work) + _alignment(work)


def prefix_workspace_bytes(work: Work, attached: bool) -> int:
    """Temporaries of one prefix forward; what is saved is copied into its slot and not counted here."""
    embedding = work.prompt_tokens * work.spec.hidden * work.itemsize
    closures = work.prompt_tokens * 2 * work.spec.head_dim * work.itemsize if attached else 0
    return embedding + closures + max(_tower_stage(work), work.prompt_tokens * _layer_stage(work))


def score_workspace_bytes(work: Work) -> int:
    """Temporaries of one detached suffix forward over `work.responses` responses."""
    tokens, s, e = _suffix_tokens(work), work.spec, work.itemsize
    shared = 6 * s.heads * s.head_dim + 2 * s.heads  # packed queries, the prefix's part, and the merge of both parts
    layer = tokens * (_layer_stage(work) + shared * e)
    head = tokens * 3 * s.hidden * e + min(tokens, LOGIT_ROWS) * 3 * s.outputs * e
    return max(layer, head)


def suffix_train_bytes(work: Work) -> int:
    """Suffix forward and backward of `work.responses` responses: activations, logits, gradients in flight."""
    tokens, s, e = _suffix_tokens(work), work.spec, work.itemsize
    kept = tokens * s.layers * (s.hidden * e if work.recompute else layer_saved_bytes(work))
    again = layer_saved_bytes(work) if work.recompute else 0
    layer = tokens * (again + _layer_backward(work))
    head = tokens * 5 * s.hidden * e + min(tokens, LOGIT_ROWS) * 4 * s.outputs * e
    weights = max(s.vocab, s.ffn, s.heads * s.head_dim) * s.hidden * e
    return kept + max(layer, head) + weights + 2 * _boundary(work)


def pieces_bytes(work: Work) -> int:
    """Gradients of the other turns' pieces of a boundary, for all trajectories of a group; none of a single turn."""
    return work.others * work.spec.kv_bytes_per_token(1, work.itemsize)


def _suffix_tokens(work: Work) -> int:
    """Tokens of a suffix forward: one for each response token, and one more where a score reads the last too."""
    return work.suffix_tokens + (work.responses if work.spec.head == "scalar" else 0)


def prefix_backward_bytes(work: Work) -> int:
    """One prefix backward, whatever became of the saved state: a dropped prefix is run again in working memory."""
    s, e = work.spec, work.itemsize
    again = layer_saved_bytes(work) if work.recompute else 0
    stage = work.prompt_tokens * (again + _layer_backward(work)) + max(s.ffn, s.heads * s.head_dim) * s.hidden * e
    if s.vision and work.vision_grad:
        v = s.vision
        block = _block_saved(work, v) if work.recompute else 0
        weights = max(_patch_elements(v), 4 * v.merge**2 * v.hidden, v.ffn) * v.hidden * e
        stage = max(stage, work.patches * (block + (9 * v.hidden + 4 * v.ffn) * e) + weights)
    return prefix_saved_bytes(work) + stage + s.vocab * s.hidden * e


def layer_saved_bytes(work: Work) -> int:
    """Saved for the backward by one language layer, for one token."""
    s, e = work.spec, work.itemsize
    heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    return 2 * max(e, 4) + 2 * s.hidden * max(e, 4) + (4 * s.hidden + 2 * heads + 2 * kv + 4 * s.ffn + s.heads) * e


def _last_layer(work: Work) -> int:
    """One norm and the unused output projection's input, for one token of a prefix; the vision mask's byte."""
    s, e = work.spec, work.itemsize
    return (s.hidden + 1) * max(e, 4) + (2 * s.hidden + s.heads * s.head_dim) * e + 1


def _block_saved(work: Work, v: VisionSpec) -> int:
    """Saved by one tower block, for one patch; two indices say which window a patch is in."""
    e, wide = work.itemsize, max(work.itemsize, 4)
    return 2 * wide + 2 * v.hidden * wide + (4 * v.hidden + 6 * v.hidden + 4 * v.ffn + v.heads) * e + 2 * 8


def _tower_saved(work: Work) -> int:
    v, e, wide = work.spec.vision, work.itemsize, max(work.itemsize, 4)
    if v is None:
        return 0
    block = v.hidden * e if work.recompute else _block_saved(work, v)
    pixels = 0 if e == 4 else _patch_elements(v) * e  # pixels come in float32: another dtype makes a copy of them
    rotary = 2 * (v.hidden // v.heads) * 4
    projector = (v.hidden + 1) * wide + 4 * v.hidden * e + 2 * 8
    return work.patches * (v.depth * block + pixels + rotary + projector)


def _tower_stage(work: Work) -> int:
    """Temporaries of one tower block: its attention, with windows gathered by their length, or its MLP."""
    v, e = work.spec.vision, work.itemsize
    if v is None:
        return 0
    pixels = 0 if e == 4 else _patch_elements(v) * e
    rotary = 2 * (v.hidden // v.heads) * 4
    attention = 7 * v.hidden * e + 7 * v.hidden * max(e, 4)
    return work.patches * (max(attention, (3 * v.hidden + 4 * v.ffn) * e) + rotary + pixels)


def _layer_stage(work: Work) -> int:
    """Temporaries of one language layer without gradients, for one token: its attention or its MLP."""
    s, e = work.spec, work.itemsize
    heads, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    attention = (2 * s.hidden + 5 * heads + 3 * kv + 2 * s.head_dim) * e
    return max(attention, (2 * s.hidden + 4 * s.ffn + 2 * s.head_dim) * e) + s.hidden * max(e, 4)


def _layer_backward(work: Work) -> int:
    """Gradients in flight in one language layer's backward, for one token."""
    s, e = work.spec, work.itemsize
    return (4 * s.hidden + 3 * s.heads * s.head_dim + 3 * s.ffn) * e


def _boundary(work: Work) -> int:
    return work.prompt_tokens * work.spec.kv_bytes_per_token(1, work.itemsize)


def _patch_elements(v: VisionSpec) -> int:
    return v.channels * v.temporal_patch * v.patch**2


def _alignment(work: Work) -> int:
    depth = work.spec.vision.depth if work.spec.vision and work.vision_grad else 0
    return ALIGN * STORAGES_A_LAYER * (work.spec.layers + depth + 1)
