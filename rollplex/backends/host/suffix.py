"""The suffix of a model call: the last prompt token and the responses, over a prefix that is already materialised.

prefix     p0 p1 .. p(P-2)               keys and values in the boundary slot, one copy for the group
suffix     p(P-1) r0 r1 .. r(T-2)        one row a response, padded on the right: causal attention makes that exact
log p             r0 r1 r2 .. r(T-1)     logits exist only at these positions, a few rows at a time
values     v0     v1 v2 ..    v(T-1)     of the state in which the token below it is chosen
score      p(P-1) r0 r1 .. r(T-1)        a reward model reads the last token too, and speaks there
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.model import HostModel, set_recompute
from rollplex.backends.training.attention import Piece, by_layer, causal_after
from rollplex.backends.training.sizes import LOGIT_ROWS


def suffix_logprobs(
    model: HostModel,
    kv: Tensor,
    prompt: Prompt,
    responses: Sequence[Tensor],
    temperature: float = 1.0,
    *,
    recompute: bool = False,
    before: Sequence[Tensor] = (),
    logit_rows: int = LOGIT_ROWS,
) -> Tensor:
    """Log-probabilities [n, T_max] of the response tokens, 0 beyond each response's end.

    `kv` is `PrefixResult.kv` or its `boundary_leaf`, `before` are the pieces that it extends; `responses` are n int64
    tensors of 1 to T_max tokens. Runs under the caller's grad mode: under no_grad this is the detached scoring of a
    reference. `recompute` keeps only layer inputs for the backward. At most `logit_rows` rows of logits exist at a
    time, in the backward too.
    """
    targets, mask = _pad(responses, kv.device)
    hidden = _forward(model, [*before, kv], prompt, targets[:, :-1], recompute)
    every = response_logprobs(model, hidden[mask], targets[mask], temperature, logit_rows)
    return every.new_zeros(mask.shape).masked_scatter(mask, every)


def suffix_values(
    model: HostModel,
    kv: Tensor,
    prompt: Prompt,
    responses: Sequence[Tensor],
    *,
    recompute: bool = False,
    before: Sequence[Tensor] = (),
) -> Tensor:
    """Values [n, T_max] of the states in which the response tokens are chosen, 0 beyond each response's end."""
    targets, mask = _pad(responses, kv.device)
    hidden = _forward(model, [*before, kv], prompt, targets[:, :-1], recompute)
    return torch.where(mask, model.score(hidden)[..., 0], 0)


def suffix_scores(
    model: HostModel,
    kv: Tensor,
    prompt: Prompt,
    responses: Sequence[Tensor],
    *,
    recompute: bool = False,
    before: Sequence[Tensor] = (),
) -> Tensor:
    """Scores [n], each read at the last token of its response."""
    tokens, mask = _pad(responses, kv.device)
    hidden = _forward(model, [*before, kv], prompt, tokens, recompute)
    return model.score(hidden[torch.arange(len(tokens)), mask.sum(1)])[:, 0]


def response_logprobs(
    model: HostModel, hidden: Tensor, tokens: Tensor, temperature: float, logit_rows: int = LOGIT_ROWS
) -> Tensor:
    """log p [m] of the tokens that hidden states [m, hidden] are followed by."""
    rows = zip(hidden.split(logit_rows), tokens.split(logit_rows), strict=True)
    return torch.cat([_head(model, states, wanted, temperature) for states, wanted in rows])


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """log p(token) [m] under softmax(logits / temperature) of logits [m, vocab]: what rollout records too.

    At least float32, whatever the logits are.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return scaled.gather(-1, tokens[:, None])[:, 0] - scaled.logsumexp(-1)


def suffix_positions(prompt: Prompt, start: int, count: int) -> Tensor:
    """mrope positions [3, 1, count] of suffix tokens start .. start + count - 1; token 0 is the last prompt token."""
    first = prompt.next_position - 1 + start
    return torch.arange(first, first + count).expand(3, 1, count)


def _pad(responses: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Response tokens [n, T] and which of them are real [n, T], where the model runs."""
    assert all(len(r) for r in responses), "every response has at least one token"
    targets = torch.nn.utils.rnn.pad_sequence(list(responses), batch_first=True)
    mask = torch.arange(targets.shape[1]) < torch.tensor([len(r) for r in responses])[:, None]
    return targets.to(device), mask.to(device)


def _forward(model: HostModel, pieces: Sequence[Tensor], prompt: Prompt, tokens: Tensor, recompute: bool) -> Tensor:
    """Hidden states [n, 1 + T, hidden] of the last prompt token and the response tokens [n, T] behind it."""
    last = prompt.input_ids[-1:].to(tokens.device)
    set_recompute(model, recompute)
    try:
        return _run_layers(model, pieces, prompt, torch.cat([last.expand(len(tokens), 1), tokens], dim=1))
    finally:
        set_recompute(model, False)


def _run_layers(model: HostModel, pieces: Sequence[Tensor], prompt: Prompt, inputs: Tensor) -> Tensor:
    language = model.model.language_model
    hidden = language.embed_tokens(inputs)
    rotary = language.rotary_emb(hidden, suffix_positions(prompt, 0, inputs.shape[1]).to(hidden.device))
    prefix = _ReadPrefix(pieces)
    for layer in language.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=prefix)
    return language.norm(hidden)


def _head(model: HostModel, hidden: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    def score(hidden: Tensor, tokens: Tensor) -> Tensor:
        return token_logprobs(model.lm_head(hidden), tokens, temperature)

    if not torch.is_grad_enabled():
        return score(hidden, tokens)
    return checkpoint(score, hidden, tokens, use_reentrant=False)


class _ReadPrefix:
    """Attention over the pieces of a boundary."""

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.layers: list[list[Piece]] = by_layer(pieces)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return causal_after(query, key, value, self.layers[layer], scale)
