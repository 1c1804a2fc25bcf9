"""Rollout by real sampling: each prompt's prefix is run once, its n responses read it, all rows decode together.

kv memory   [ prefix of prompt 0 | prefix of prompt 1 | .. | own tokens: layer x (K, V) x slot x kv_head x token ]

A row is one response; live rows sit in the first slots, so that finished rows cost nothing: when rows end, the rows
behind them move up. The uniform numbers of all rows are drawn at the start: what a row samples does not depend on when
other rows end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.hf.model import HostModel
from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.host.suffix import suffix_positions, token_logprobs
from rollplex.backends.training.attention import attend_filled, attend_prefix, causal_after, merge
from rollplex.ir.errors import OutOfMemory


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
        begun: Rollout | None = None,
        version: int = 0,
        on_step: Callable[[int, int], None] = lambda step, live: None,
    ) -> None:
        """Prefill; temperature 0 takes the likeliest token.

        `model` is whole, or one rank's of `tp` that sample the same tokens together.
        `kv` is flat memory of the caller's in the model's dtype that holds all keys and values (sizes.rollout_kv_bytes
        at most); raises OutOfMemory with the shortfall. `on_step(step, live rows)` is called after every prefill (step
        0) and every decode step: as many tokens has each live row got. `dice` has a generator for each prompt: what a
        prompt samples does not depend on which others share its engine. The same generator states, weights, prompts and
        thread count give the same bits.
        `begun` are responses to the first prompts that an earlier step has left: their tokens are prefilled again and
        keep their log-probabilities and versions; new tokens are of `version`.
        """
        cache = Cache(model, prompts, n, max_tokens, kv, tp)
        ends = [most for prompt in prompts for most in prompt.response_lengths or (0,) * n]
        made, thrown = Rows.of(len(prompts), n, max_tokens, kv.dtype, begun, ends), throws(dice, n, max_tokens)
        first = torch.cat([p.input_ids[-1:].expand(n) for p in prompts])
        self._begin(model, cache, made, first, thrown, temperature, eos, version, on_step)
        prefill(model, cache, prompts, on_step)
        _go_on(model, cache, made, prompts)
        self._drop_ended(int(made.lengths.max()))

    def _begin(
        self,
        model: HostModel,
        cache: Cache,
        made: Rows,
        first: Tensor,
        thrown: Tensor,
        temperature: float,
        eos: Sequence[int],
        version: int,
        on_step: Callable[[int, int], None],
    ) -> None:
        """Rows to sample behind the tokens `first` [row] of what the cache holds."""
        self._model, self._cache, self._made, self._first, self._thrown = model, cache, made, first, thrown
        self._temperature, self._on_step = temperature, on_step
        self._eos, self._version, self._prompts, self._step = torch.tensor(eos), version, len(cache.prefixes), 0

    @torch.no_grad()
    def until(self, prompts: Sequence[int]) -> Rollout:
        """Decode until the last response to these prompts has ended; they alone, in this order."""
        wanted = torch.tensor(list(prompts), dtype=torch.int64)
        while torch.isin(self._cache.prompt_of[self._cache.live], wanted).any():
            self._one_token()
        return self._made.rollout(self._prompts).rows(prompts)

    @torch.no_grad()
    def first(self, count: int) -> tuple[Rollout, Rollout]:
        """Decode until `count` prompts have all of their responses: those, and the others as far as they are.

        Of prompts that complete at the same token the first come first.
        """
        complete = self._cache.complete(but=())
        while len(complete) < count:
            self._one_token()
            complete += self._cache.complete(but=complete)
        taken = set(complete[:count])
        every, prompts = self._made.rollout(self._prompts), range(self._prompts)
        return every.rows([p for p in prompts if p in taken]), every.rows([p for p in prompts if p not in taken])

    def _one_token(self) -> None:
        """One more token of every live row."""
        live = self._cache.live
        at = self._made.lengths[live]
        logits, longest = _decode(self._model, self._cache, self._made.last(live, self._first), at), int(at.max()) + 1
        tokens = _sample(logits, self._temperature, self._thrown[live, at])
        self._made.add(live, tokens, token_logprobs(logits, tokens, self._temperature or 1.0), self._version)
        self._drop_ended(longest)
        self._step += 1
        self._on_step(self._step, len(self._cache.live))

    def _drop_ended(self, longest: int) -> None:
        self._cache.drop(self._made.ended(self._cache.live, self._eos), longest)


@dataclass
class Rows:
    """What all rows have so far: [row, token], and [row] tokens of each.

    `ends` [row] are the tokens after which a row ends, whatever they are; 0: at an end token, or without more room.
    """

    tokens: Tensor
    lengths: Tensor
    logprobs: Tensor
    versions: Tensor
    ends: Tensor

    @classmethod
    def of(
        cls, prompts: int, n: int, max_tokens: int, dtype: torch.dtype, begun: Rollout | None, ends: Sequence[int] = ()
    ) -> Rows:
        shape = (prompts * n, max_tokens)
        rows = cls(
            torch.zeros(shape, dtype=torch.int64),
            torch.zeros(shape[0], dtype=torch.int64),
            torch.zeros(shape, dtype=torch.promote_types(dtype, torch.float32)),
            torch.zeros(shape, dtype=torch.int32),
            torch.tensor(ends or [0] * shape[0]),
        )
        if begun is not None:
            count = begun.lengths.numel()
            rows.lengths[:count] = begun.lengths.flatten()
            for into, found in (
                (rows.tokens, begun.tokens),
                (rows.logprobs, begun.logprobs),
                (rows.versions, begun.versions),
            ):
                into[:count] = found.flatten(0, 1)
        return rows

    def add(self, rows: Tensor, tokens: Tensor, logprobs: Tensor, version: int) -> None:
        """One more token of each of these rows."""
        at = self.lengths[rows]
        self.tokens[rows, at], self.logprobs[rows, at], self.versions[rows, at] = tokens, logprobs, version
        self.lengths[rows] = at + 1

    def last(self, rows: Tensor, first: Tensor) -> Tensor:
        """The last token of each of these rows; of one that has none the prompt's, `first` [row]."""
        at = self.lengths[rows]
        return torch.where(at > 0, self.tokens[rows, at.clamp(min=1) - 1], first[rows])

    def ended(self, rows: Tensor, eos: Tensor) -> Tensor:
        """Which of these rows have their end token, or no room for another one."""
        at, fixed = self.lengths[rows], self.ends[rows]
        stopped = torch.isin(self.tokens[rows, at.clamp(min=1) - 1], eos) & (at > 0) & (fixed == 0)
        return stopped | (at == torch.where(fixed > 0, fixed, self.tokens.shape[1]))

    def rollout(self, prompts: int) -> Rollout:
        """All rows by prompt."""
        tokens, lengths, logprobs, versions = (
            x.view(prompts, -1, *x.shape[1:]) for x in (self.tokens, self.lengths, self.logprobs, self.versions)
        )
        return Rollout(tokens, lengths, logprobs, torch.arange(prompts), versions)


def _go_on(model: HostModel, cache: Cache, made: Rows, prompts: Sequence[Prompt]) -> None:
    """Prefill what rows have already but for their last token, which is the next to go in: row by row."""
    language = model.model.language_model
    for row in made.lengths.nonzero()[:, 0].tolist():
        prompt, count = prompts[int(cache.prompt_of[row])], int(made.lengths[row])
        prompt = prompt.on(cache.own.device, cache.own.dtype)
        inputs = torch.cat([prompt.input_ids[-1:], made.tokens[row, : count - 1].to(cache.own.device)])[None]
        hidden = language.embed_tokens(inputs)
        rotary = language.rotary_emb(hidden, suffix_positions(prompt, 0, count).to(hidden.device))
        prefill = _Prefill(cache, row, count)
        for layer in language.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=prefill)


def throws(dice: Sequence[torch.Generator], n: int, max_tokens: int) -> Tensor:
    """The uniform numbers [row, token] of a turn, from each prompt's own generator."""
    return torch.cat([torch.rand(n, max_tokens, generator=die, dtype=torch.float64) for die in dice])


def prefill(
    model: HostModel,
    cache: Cache,
    prompts: Sequence[Prompt],
    on_step: Callable[[int, int], None] = lambda step, live: None,
) -> None:
    """Run the prefix of every prompt, once for all its responses."""
    for slot, prompt in zip(cache.prefixes, prompts, strict=True):
        run_prefix(model, prompt, slot, attached=False)
        on_step(0, len(cache.live))


def _sample(logits: Tensor, temperature: float, dice: Tensor) -> Tensor:
    """One token a row by inverting the cumulative distribution at `dice`."""
    if temperature == 0:
        return logits.argmax(-1)
    cumulative = (logits.double() / temperature).softmax(-1).cumsum(-1)
    found = torch.searchsorted(cumulative, (dice * cumulative[:, -1])[:, None], right=True)[:, 0]
    return found.clamp(max=logits.shape[-1] - 1)


def _decode(model: HostModel, cache: Cache, tokens: Tensor, at: Tensor) -> Tensor:
    """Logits [live, vocab], on the host, after one more token a row, which is the row's `at`-th."""
    language, device = model.model.language_model, cache.own.device
    cache.at = at
    hidden = language.embed_tokens(tokens[:, None].to(device))
    positions = (cache.first_position[cache.live] + at).expand(3, -1)[..., None].to(device)
    rotary = language.rotary_emb(hidden, positions)
    for layer in language.layers:
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=cache)
    return model.lm_head(language.norm(hidden))[:, 0].cpu()


class Cache:
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
        self.at = torch.zeros(rows, dtype=torch.int64)
        self._group()

    def drop(self, ended: Tensor, tokens: int) -> None:
        """Close the gaps that ended rows leave; no row has more than `tokens`."""
        if ended.any():
            stay = (~ended).nonzero()[:, 0]
            moved = stay != torch.arange(len(stay))
            self.own[:, :, : len(stay), :, :tokens][:, :, moved] = self.own[:, :, stay[moved], :, :tokens]
            self.live = self.live[stay]
            self._group()

    def complete(self, but: Sequence[int]) -> list[int]:
        """Prompts of which no row decodes any more, without those that are known."""
        decoding = set(self.prompt_of[self.live].tolist())
        return [p for p in range(len(self.prefixes)) if p not in decoding and p not in but]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Store one token a row and attend to the row's own tokens and its prompt's prefix."""
        grouped = query[:, :, 0].unflatten(1, (key.shape[1], -1))
        out, lse = self._own(layer, grouped, key, value, scale)
        other, other_lse = torch.empty_like(out), torch.empty_like(lse)
        for prompt, start, stop in self.spans:
            prefix_key, prefix_value = self.prefixes[prompt][layer]
            packed = grouped[start:stop].transpose(0, 1).flatten(1, 2)[None]
            found, found_lse = attend_prefix(packed, prefix_key[None], prefix_value[None], scale)
            other[start:stop] = found[0].unflatten(1, (stop - start, -1)).transpose(0, 1)
            other_lse[start:stop] = found_lse[0].unflatten(1, (stop - start, -1)).transpose(0, 1)
        return merge(out, lse, other, other_lse)[0].flatten(1, 2)[:, :, None].to(query.dtype)

    def _own(self, layer: int, grouped: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Attention of the rows to their own tokens, this one included; live rows sit in the first slots."""
        rows = len(key)
        slots, longest = torch.arange(rows), int(self.at.max())
        self.own[layer, 0][slots, :, self.at] = key[:, :, 0]
        self.own[layer, 1][slots, :, self.at] = value[:, :, 0]
        own = self.own[layer, :, :rows, :, : longest + 1]
        if int(self.at.min()) == longest:
            return attend_prefix(grouped, own[0], own[1], scale)
        return attend_filled(grouped, own[0], own[1], self.at + 1, scale)

    def _group(self) -> None:
        """(prompt, first slot, slot after the last): rows keep their order, so a prompt's live rows are neighbours."""
        prompts, counts = self.prompt_of[self.live].unique_consecutive(return_counts=True)
        stops = counts.cumsum(0)
        self.spans = list(zip(prompts.tolist(), (stops - counts).tolist(), stops.tolist(), strict=True))


class _Prefill:
    """Stores the first tokens of one row, which attend to each other and to the prompt's prefix."""

    def __init__(self, cache: Cache, row: int, count: int) -> None:
        self.own = cache.own[:, :, row, :, :count]
        self.prefix = cache.prefixes[int(cache.prompt_of[row])]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        self.own[layer, 0], self.own[layer, 1] = key[0], value[0]
        return causal_after(query, key, value, [(self.prefix[layer, 0], self.prefix[layer, 1])], scale)


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
