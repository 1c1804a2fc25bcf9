"""A call that is not split: every response behind its own prompt in one sequence, by plain causal attention.

p0 p1 .. p(P-1) r0 r1 .. r(T-1)      all of it is run; log-probabilities and values from position P - 1 on
score                                 at r(T-1)

Its prompts are known only when the response is, or its responses before the rollout: no prefix is shared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.model import HostModel, set_recompute
from rollplex.backends.host.prefix import embed_prompt
from rollplex.backends.host.suffix import response_logprobs, suffix_positions
from rollplex.backends.training.attention import causal


def whole_numbers(
    model: HostModel, prompt: Prompt, response: Tensor, head: str, temperature: float, recompute: bool
) -> Tensor:
    """What a model's head says of one response [T]: log-probabilities or values [1, T], a score [1].

    Under the caller's grad mode; `recompute` keeps only layer inputs for the backward.
    """
    set_recompute(model, recompute)
    try:
        hidden = _run_layers(model, prompt, response)[len(prompt.input_ids) - 1 :]
    finally:
        set_recompute(model, False)
    if head == "score":
        return model.score(hidden[-1])
    if head == "values":
        return model.score(hidden[:-1]).T
    return response_logprobs(model, hidden[:-1], response, temperature)[None]


def _run_layers(model: HostModel, prompt: Prompt, response: Tensor) -> Tensor:
    """Hidden states [P + T, hidden]. A sampled token is text, even where it is that of a video's patch."""
    language = model.model.language_model
    seen, said = embed_prompt(model, prompt, len(prompt.input_ids)), language.embed_tokens(response[None])
    hidden = torch.cat([seen, said], dim=1)
    positions = torch.cat([prompt.position_ids[:, None], suffix_positions(prompt, 1, len(response))], dim=2)
    rotary = language.rotary_emb(hidden, positions)
    for layer in language.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=_Causal())
    return language.norm(hidden)[0]


class _Causal:
    """Attention over the sequence itself."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        return causal(query, key, value, scale)
