"""What work takes where Megatron's modules run as CPU processes: arithmetic, no engine imported.

Saved of an attached prefix

per token of a language layer on one of t ranks (bytes are elements x itemsize; `wide` = at least float32)
    norms        2 x (input, normalised [hidden, wide], scaled)                        2 wide + 2 hidden wide + 4 hidden
                 cut by sequence parallelism, of 1 / t of the tokens, as is what recomputation keeps
    attention    rotated query and key, value, output; log-sum-exp; under sequence parallelism the padded output too
                 cosine and sine, made again for query and for key                     4 head_dim
    mlp          gate and up, product                                                  3 ffn / t
per patch of a tower block, whole on every rank: the same, with biases; two indices say its window

Unlike a GPU's fused kernels, Megatron's torch parts rotate by angles that each layer turns into cosines anew.
Workspaces are those of the host engine with five tensors as wide as the MLP for its four; a share of them would do for
each of several ranks. All figures are upper bounds for one prompt.
"""

from __future__ import annotations

from rollplex.backends.training import sizes as host
from rollplex.backends.training.sizes import ALIGN, STORAGES_A_LAYER
from rollplex.ir.spec import VisionSpec
from rollplex.ir.work import Work


def prefix_saved_bytes(work: Work) -> int:
    """Saved state of one attached prefix; with recompute only what checkpoints keep."""
    s, stretch = work.spec, _stretch(work)
    tokens = stretch * work.tp if work.sequence_parallel else work.prompt_tokens  # with the padding of the stretches
    kept = tokens * _inside(work) + stretch * 2 * _norm(s.hidden, work.itemsize)
    layer = stretch * s.hidden * work.itemsize if work.recompute else kept
    last = tokens * _last_layer(work) + stretch * _norm(s.hidden, work.itemsize)
    tower = work.patches * _patch(work, s.vision) if s.vision and work.vision_grad else 0
    rotary = 2 * s.head_dim * max(work.itemsize, 4)
    depth = s.layers + (s.vision.depth if s.vision and work.vision_grad else 0)
    storages = depth + 2 * STORAGES_A_LAYER if work.recompute else STORAGES_A_LAYER * (depth + 1)
    return tower + (s.layers - 1) * layer + last + tokens * rotary + ALIGN * storages


def prefix_workspace_bytes(work: Work, attached: bool) -> int:
    """Temporaries of one prefix forward."""
    return _wider(host.prefix_workspace_bytes(work, attached))


def score_workspace_bytes(work: Work) -> int:
    """Temporaries of one suffix forward without gradients."""
    return _wider(host.score_workspace_bytes(work))


def train_activation_bytes(work: Work) -> int:
    """Suffix step, and prefix backward with everything made again: their sum, more than either needs."""
    return _wider(host.suffix_train_bytes(work) + host.prefix_backward_bytes(work))


def _wider(nbytes: int) -> int:
    return nbytes * 5 // 4


def _stretch(work: Work) -> int:
    """Tokens of a rank between the cut linears."""
    return -(-work.prompt_tokens // work.tp) if work.sequence_parallel else work.prompt_tokens


def _inside(work: Work) -> int:
    """Saved for the backward by attention and MLP of one language layer, for one token."""
    s, e = work.spec, work.itemsize
    q, kv = s.heads * s.head_dim // work.tp, s.kv_heads_per_rank(work.tp) * s.head_dim
    padded = q if work.sequence_parallel else 0  # the kernel keeps its output, the projection the padded one
    attention = 2 * q + 2 * kv + padded + s.heads // work.tp + 4 * s.head_dim
    return (attention + 3 * s.ffn // work.tp) * e


def _norm(width: int, itemsize: int) -> int:
    wide = max(itemsize, 4)
    return wide + width * wide + 2 * width * itemsize


def _last_layer(work: Work) -> int:
    """Beside its norm: the projections and the unused output projection's input; the vision mask's byte."""
    s, e = work.spec, work.itemsize
    q, kv = s.heads * s.head_dim // work.tp, s.kv_heads_per_rank(work.tp) * s.head_dim
    return (3 * q + 3 * kv + 4 * s.head_dim) * e + 1 + 8


def _patch(work: Work, v: VisionSpec) -> int:
    """Saved by the tower and its projector, for one patch."""
    e, wide = work.itemsize, max(work.itemsize, 4)
    head_dim = v.hidden // v.heads
    attention = 4 * v.hidden + v.heads + 4 * head_dim
    block = 2 * _norm(v.hidden, e) + (attention + 3 * v.ffn) * e + 2 * 8
    pixels = 0 if e == 4 else v.channels * v.temporal_patch * v.patch**2 * e  # another dtype makes a copy of them
    projector = _norm(v.hidden, e) + 4 * v.hidden * e + 2 * 8
    return v.depth * (v.hidden * e if work.recompute else block) + pixels + 2 * head_dim * wide + projector
