"""The prefix of a model call on one rank: everything before the last prompt token, run once for a group of responses.

slot = empty(boundary_shape(spec, tp, tokens))                          the caller's memory
result = run_prefix(model, prompt, slot, attached=True, saved=policy)     this rank's keys and values are in the slot
... suffix work reads the slot, its backward leaves dK, dV ...
prefix_backward(result, kv_grads)                                       language prefix, projector, vision tower

Hidden states are the same on every rank, and so are their gradients: Megatron reduces them behind every column-parallel
linear. So norms and the tower get their whole gradient on each rank, and nothing of theirs is reduced afterwards.
Where ranks have stretches of the tokens, their norms sum up what each adds.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.megatron.layers import run_layers
from rollplex.backends.megatron.model import MegatronQwen
from rollplex.backends.megatron.rotary import turning
from rollplex.backends.training.boundary import Capture, PrefixResult, materialise
from rollplex.backends.training.saved import SavedPolicy
from rollplex.ir.spec import ModelSpec


def boundary_shape(spec: ModelSpec, tp: int, prefix_tokens: int) -> tuple[int, int, int, int, int]:
    """(layers, 2 for K and V, KV heads of a rank, prefix_tokens, head_dim) of one prompt's boundary."""
    return (spec.layers, 2, spec.kv_heads_per_rank(tp), prefix_tokens, spec.head_dim)


def run_prefix(
    model: MegatronQwen, prompt: Prompt, slot: Tensor, *, attached: bool, saved: SavedPolicy | None = None
) -> PrefixResult:
    """Run prompt[:-1] and write every layer's keys and values into `slot` (boundary_shape, possibly longer).

    Raises OutOfMemory when the prompt is longer than the slot or its saved state larger than the policy's pool.
    """
    return materialise(model, prompt, slot, partial(_forward, model, prompt), attached=attached, saved=saved)


def _forward(model: MegatronQwen, prompt: Prompt, capture: Capture, recompute: bool) -> None:
    """Language layers over the prefix; of the last layer only keys and values are needed, so its rest is not run."""
    tokens, prompt = prompt.prefix_tokens, prompt.on(model.device, model.dtype)
    hidden = model.scattered(model.embed_prompt(prompt, tokens, recompute))
    rotary, io = model.angles(prompt.position_ids[:, :tokens]), model.attending(capture, tokens)
    *layers, last = model.layers
    hidden = run_layers(layers, hidden, [io] * len(layers), rotary, recompute)
    last.self_attention(last.input_layernorm(hidden), io, rotary_pos_emb=turning(rotary))
