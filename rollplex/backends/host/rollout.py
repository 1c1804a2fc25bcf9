"""Rollout by real sampling: each prompt's prefix is run once, its n responses read it, all rows decode together.

kv memory   [ prefix of prompt 0 | prefix of prompt 1 | .. | own tokens: layer x (K, V) x slot x kv_head x token ]

A row is one response; live rows sit in the first slots, so that finished rows cost nothing: when rows end, the rows
behind them move up. The uniform numbers of all rows are drawn at the start: what a row samples does not depend on when
other rows end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.hf.model import HostModel
from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.suffix import token_logprobs
from rollplex.backends.training.attention import attend_prefix, merge
from rollplex.ir.errors import OutOfMemory


@torch.no_grad()
def generate(
    model: HostModel,
    prompts: Sequence[Prompt],
    n: int,
    max_tokens: int,
    temperature: float,
    dice: Sequence[torch.Generator],
    kv: Tensor,
    *,
    eos: Sequence[int],
    tp: int = 1,
    on_step: Callable[[int, int], None] = lambda step, live: None,
) -> Rollout:
    """Sample n responses of up to `max_tokens` tokens for every prompt, all of them; the arguments are `Decoding`'s."""
    decoding = Decoding(model, prompts, n, max_tokens, temperature, dice, kv, eos=eos, tp=tp, on_step=on_step)
    return decoding.until(range(len(prompts)))


class Decoding:
    """One step's sampling, which goes on as far as somebody waits for: `until` these prompts, then those.

    Rows of all prompts decode together, whoever is waited for.
    """

    @torch.no_grad()
    def __init__(
        self,
        model: HostModel,
        prompts: Sequence[Prompt],
        n: int,
        max_tokens: int,
        temperature: float,
        dice: Sequence[torch.Generator],
        kv: Tensor,
        *,
        eos: Sequence[int],
        tp: int = 1,
        on_step: Callable[[int, int], None] = lambda step, live: None,
    ) -> None:
        """Prefill; temperature 0 takes the likeliest token.

        `model` is whole, or one rank's of `tp` that sample the same tokens together.
        `kv` is flat memory of the caller's in the model's dtype that holds all keys and values (sizes.rollout_kv_bytes
        at most); raises OutOfMemory with the shortfall. `on_step(step, live rows)` is called after every prefill (step
        0) and every decode step. `dice` has a generator for each prompt: what a prompt samples does not depend on which
        others share its engine. The same generator states, weights, prompts and thread count give the same bits.
        """
        self._model, self._temperature, self._on_step = model, temperature, on_step
        self._cache = _Cache(model, prompts, n, max_tokens, kv, tp)
        self._eos, self._step, self._shape = torch.tensor(eos), 0, (len(prompts), n, max_tokens)
        rows = len(prompts) * n
        self._thrown = torch.cat([torch.rand(n, max_tokens, generator=die, dtype=torch.float64) for die in dice])
        for slot, prompt in zip(self._cache.prefixes, prompts, strict=True):
            run_prefix(model, prompt, slot, attached=False)
            on_step(0, rows)
        self._tokens = torch.zeros(rows, max_tokens, dtype=torch.int64)
        self._lengths = torch.full((rows,), max_tokens)
        self._logprobs = torch.zeros(rows, max_tokens, dtype=kv.dtype)
        self._current = torch.cat([p.input_ids[-1:].expand(n) for p in prompts])

    @torch.no_grad()
    def until(self, prompts: Sequence[int]) -> Rollout:
        """Decode until the last response to these prompts has ended; they alone, in this order."""
        wanted = torch.tensor(list(prompts), dtype=torch.int64)
        while self._step < self._shape[2] and torch.isin(self._cache.prompt_of[self._cache.live], wanted).any():
            self._one_token()
        tokens, logprobs = self._tokens.view(self._shape), self._logprobs.view(self._shape)
        return Rollout(tokens[wanted], self._lengths.view(self._shape[:2])[wanted], logprobs[wanted])

    def _one_token(self) -> None:
        """One more token of every live row."""
        live, step = self._cache.live, self._step
        logits = _decode(self._model, self._cache, self._current, step)
        current = _sample(logits, self._temperature, self._thrown[live, step])
        self._tokens[live, step] = current
        self._logprobs[live, step] = token_logprobs(logits, current, self._temperature or 1.0)
        ended = torch.isin(current, self._eos)
        self._lengths[live[ended]] = step + 1
        self._current = self._cache.drop(ended, current, step + 1)
        self._step += 1
        self._on_step(self._step, len(self._current))


def _sample(logits: Tensor, temperature: float, dice: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution at `dice`."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    found = torch.searchsorted(cumulative, (dice * cumulative[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


def _decode(model: HostModel, cache: _Cache, tokens: Tensor, step: int) -> Tensor:
    """Logits [live, vocab] after one more token a row."""
    language = model.model.language_model
    cache.step = step
    hidden = language.embed_tokens(tokens[:, None])
    positions = (cache.first_position[cache.live] + step).expand(3, -1)[..., None]
    rotary = language.rotary_emb(hidden, positions)
    for layer in language.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=cache)
    return model.lm_head(language.norm(hidden))[:, 0]


class _Cache:
    """Keys and values in the caller's memory, and which row sits in which slot (`live`)."""

    def __init__(
        self, model: HostModel, prompts: Sequence[Prompt], n: int, max_tokens: int, kv: Tensor, tp: int
    ) -> None:
        config = model.config.to_dict()
        shapes = [boundary_shape(config, p.prefix_tokens, tp) for p in prompts]
        layers, _, kv_heads, _, head_dim = shapes[0]
        rows = len(prompts) * n
        own = (layers, 2, rows, kv_heads, max_tokens, head_dim)
        *self.prefixes, self.own = _carve(kv, [*shapes, own])
        self.first_position = torch.tensor([p.next_position - 1 for p in prompts]).repeat_interleave(n)
        self.prompt_of = torch.arange(len(prompts)).repeat_interleave(n)
        self.live = torch.arange(rows)
        self.step = 0
        self._group()

    def drop(self, ended: Tensor, current: Tensor, tokens: int) -> Tensor:
        """Close the gaps that ended rows leave; `current` without them."""
        if ended.any():
            stay = (~ended).nonzero()[:, 0]
            moved = stay != torch.arange(len(stay))
            self.own[:, :, : len(stay), :, :tokens][:, :, moved] = self.own[:, :, stay[moved], :, :tokens]
            self.live, current = self.live[stay], current[stay]
            self._group()
        return current

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store one token a row and attend to the row's own tokens and its prompt's prefix."""
        rows, kv_heads = key.shape[:2]
        self.own[layer, 0, :rows, :, self.step] = key[:, :, 0]
        self.own[layer, 1, :rows, :, self.step] = value[:, :, 0]
        own = self.own[layer, :, :rows, :, : self.step + 1]
        grouped = query[:, :, 0].unflatten(1, (kv_heads, -1))
        out, lse = attend_prefix(grouped, own[0], own[1], scale)
        other, other_lse = torch.empty_like(out), torch.empty_like(lse)
        for prompt, start, stop in self.spans:
            prefix_key, prefix_value = self.prefixes[prompt][layer]
            packed = grouped[start:stop].transpose(0, 1).flatten(1, 2)[None]
            found, found_lse = attend_prefix(packed, prefix_key[None], prefix_value[None], scale)
            other[start:stop] = found[0].unflatten(1, (stop - start, -1)).transpose(0, 1)
            other_lse[start:stop] = found_lse[0].unflatten(1, (stop - start, -1)).transpose(0, 1)
        return merge(out, lse, other, other_lse)[0].flatten(1, 2)[:, :, None]

    def _group(self) -> None:
        """(prompt, first slot, slot after the last): rows keep their order, so a prompt's live rows are neighbours."""
        prompts, counts = self.prompt_of[self.live].unique_consecutive(return_counts=True)
        stops = counts.cumsum(0)
        self.spans = list(zip(prompts.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))


def _carve(memory: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    sizes = [torch.Size(s).numel() for s in shapes]
    if sum(sizes) > memory.numel():
        short = (sum(sizes) - memory.numel()) * memory.element_size()
        raise OutOfMemory(
            f"rollout needs {sum(sizes) * memory.element_size():,} bytes of KV, its memory is {short:,} bytes short",
            where="rollout KV",
            hint="raise the KV budget, or lower prompts, group, prompt_tokens or response_tokens",
        )
    parts = memory[: sum(sizes)].split(sizes)
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
