"""The formulas of FSDP's workspaces: whole sequences, gathered units, logits of prompt and response, uncut.

fsdp_train(work, (10, 6))     max(at the logits, in a layer) + gathered units
"""

from __future__ import annotations

from dataclasses import replace

from rollplex.ir.formula import Formula, largest, n, part
from rollplex.ir.spec import ModelSpec
from rollplex.ir.work import Work
from rollplex.passes.formulas_work import NOTHING, Tokens, patches_bytes

LOGITS = {"fsdp": (10, 6), "fsdp_fused": (2, 2)}
"""Bytes of a logit forward, and more of it backward, by engine."""
NORMS = 8
"""Bytes of hidden a token that FP32 norms keep beside what a fused norm does."""
BUCKET = 5 * 10**8


def _norms(width: int) -> Formula:
    return n(NORMS, "B") * n(width, "hidden")


def _layer(t: Tokens) -> Formula:
    s, work = t.work.spec, t.work
    more = n(work.swapped_heads - s.heads - 2 * s.kv_heads, "heads more") * n(s.head_dim) * t.item
    return t.named("transformers' layer", t.layer() + _norms(s.hidden) + (more if work.cp > 1 else NOTHING))


def _forward(work: Work) -> Formula:
    """One layer's forward; with sequences cut by heads, q, k, v and output lie there twice around attention."""
    t, s = Tokens(replace(work, cp=1), work.response_tokens), work.spec
    if work.cp == 1:
        return t.forward()
    heads = n(2) * n(s.heads, "heads") + n(2) * n(s.kv_heads, "KV heads") + n(work.swapped_heads, "exchanged heads")
    twice = n(4) * n(s.hidden, "hidden") * t.item + heads * n(s.head_dim) * t.item + n(2) * t.scores()
    return largest(t.forward(), twice)


def _tokens(work: Work) -> Formula:
    return n(work.local(work.responses * work.response_tokens), "tokens")


def _units(spec: ModelSpec) -> tuple[Formula, Formula]:
    """Parameters of the root unit and of the largest layer's."""
    layers = [0] * spec.layers
    root = 0
    for t in (t for t in spec.tensors() if t.part == "language"):
        if t.layer is None:
            root += t.numel
        else:
            layers[t.layer] += t.numel
    return n(root, "parameters of the root unit"), n(max(layers), "parameters of a layer")


def _gathered(work: Work) -> Formula:
    """Units whole in the model's dtype while a pass runs."""
    if work.zero < 3:
        return NOTHING
    root, layer = _units(work.spec)
    return part("gathered units", (root + n(2) * layer) * n(work.itemsize, "B"))


def fsdp_score(work: Work, logits: tuple[int, int]) -> Formula:
    """One layer's forward or the logits of whole sequences, with the gathered units."""
    t, s = Tokens(work, work.response_tokens), work.spec
    head = n(logits[0], "B") * n(s.outputs, "outputs") + n(2) * n(s.hidden, "hidden") * t.item
    forward = t.named("forward of transformers' layer", _forward(work) + _norms(s.hidden))
    tower = patches_bytes(work, (5, 3), work.responses)
    return largest(_tokens(work) * largest(forward, part("head", head)), tower) + _gathered(work)


def fsdp_train(work: Work, logits: tuple[int, int]) -> Formula:
    """Everything kept of a microbatch, the fullest instant of its backward, its towers."""
    t, s = Tokens(work, work.response_tokens), work.spec
    kept = _tokens(work) * n(work.layers, "layers") * (t.layer_input() if work.recompute else _layer(t))
    again = _layer(t) if work.recompute else n(2) * t.scores()
    each = n(sum(logits), "B") * n(s.outputs, "outputs") + n(4) * n(s.hidden, "hidden") * t.item
    head = part("head", _tokens(work) * each)
    return _tower(work) + _peak(work, part("kept", kept), head, _tokens(work) * again)


def _peak(work: Work, kept: Formula, head: Formula, layer: Formula) -> Formula:
    item = n(work.itemsize, "B")
    if work.zero < 3:
        return kept + largest(head, layer) + (n(BUCKET, "gradients of a bucket") * item if work.zero else NOTHING)
    root, one = _units(work.spec)
    reduced = n(work.itemsize + 4, "B")
    waits = part("head's gradient", n(work.spec.outputs, "outputs") * n(work.spec.hidden, "hidden") * item)
    instants = kept + head + waits, kept + layer + waits + one * reduced, root * reduced
    return part("fullest instant", largest(*instants)) + _gathered(work)


def _tower(work: Work) -> Formula:
    vision = work.spec.vision
    if vision is None:
        return NOTHING
    if not work.vision_grad:
        return patches_bytes(work, (5, 3), work.responses)
    block = patches_bytes(work, (8, 4), work.responses) + n(work.responses * work.patches) * _norms(vision.hidden)
    blocks = n(vision.depth, "blocks")
    inputs = blocks * patches_bytes(work, (1, 0), work.responses)
    return part("tower", inputs + block if work.recompute else blocks * block)
