"""Rollouts of several turns: the keys and values of a trajectory stay where they are from turn to turn.

kv memory   [ prefix of prompt 0 | .. | own tokens: layer x (K, V) x trajectory x kv_head x token ]
turn 1      prefixes, then decode                 own   p(P-1) r0 r1 .. r(T-2)
turn t      what is new of each history, decode   own   .. r(T-1) o0 o1 .. o(S-2) | o(S-1) r0 r1 ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rollplex.backends.data.histories import Histories
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.hf.model import HostModel
from rollplex.backends.host.rollout import Cache, Decoding, Rows, prefill, throws
from rollplex.backends.training.attention import Piece, attend_prefix, by_layer, causal_after


class TrajectoryCache(Cache):
    """A row is a trajectory and keeps its slot; each has `stored` own tokens behind the `base` of its prompt."""

    def __init__(
        self, model: HostModel, prompts: Sequence[Prompt], n: int, own_tokens: int, kv: Tensor, tp: int
    ) -> None:
        super().__init__(model, prompts, n, own_tokens, kv, tp)
        self.base = torch.tensor([p.prefix_tokens for p in prompts]).repeat_interleave(n)
        self.stored = torch.zeros(len(self.base), dtype=torch.int64)

    def drop(self, ended: Tensor, tokens: int) -> None:
        if ended.any():
            self.live = self.live[~ended]
            self._group()

    def decoded(self, lengths: Tensor) -> None:
        """A turn is sampled: of each response all but the last token has been run, behind the last one before it."""
        self.stored += lengths

    def wake(self, next_positions: Tensor) -> None:
        """A turn begins: every trajectory is sampled from again, its next token where its history ends."""
        self.live = torch.arange(len(self.base))
        self.first_position = next_positions - 1
        self._group()

    def _own(self, layer: int, grouped: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Rows have stored different numbers of tokens, so each is attended to by itself."""
        found = []
        for i, row in enumerate(self.live.tolist()):
            at = int(self.stored[row] + self.at[i])
            self.own[layer, 0, row, :, at] = key[i, :, 0]
            self.own[layer, 1, row, :, at] = value[i, :, 0]
            own = self.own[layer, :, row : row + 1, :, : at + 1]
            found.append(attend_prefix(grouped[i : i + 1], own[0], own[1], scale))
        out, lse = zip(*found, strict=True)
        return torch.cat(out), torch.cat(lse)


@dataclass(frozen=True)
class Sampling:
    """What is sampled in a turn: `n` trajectories a prompt, up to `max_tokens` each, until a token of `eos`."""

    n: int
    max_tokens: int
    temperature: float
    eos: tuple[int, ...]


class _Turn(Decoding):
    """Decoding behind the histories of trajectories whose keys and values are there."""

    def __init__(
        self,
        model: HostModel,
        cache: Cache,
        last: Tensor,
        sampling: Sampling,
        dice: Sequence[torch.Generator],
        version: int,
    ) -> None:
        n, most = sampling.n, sampling.max_tokens
        made, thrown = Rows.of(len(dice), n, most, cache.own.dtype, None), throws(dice, n, most)
        quiet = lambda step, live: None  # noqa: E731
        self._begin(model, cache, made, last, thrown, sampling.temperature, sampling.eos, version, quiet)


@dataclass
class Trajectories:
    """The trajectories of one step on one rank, turn by turn."""

    model: HostModel
    sampling: Sampling
    cache: TrajectoryCache

    @classmethod
    def begin(
        cls, model: HostModel, prompts: Sequence[Prompt], sampling: Sampling, own_tokens: int, kv: Tensor, tp: int
    ) -> Trajectories:
        """Run every prompt's prefix; `own_tokens` are those that a trajectory may add to its prompt."""
        with torch.no_grad():
            cache = TrajectoryCache(model, prompts, sampling.n, own_tokens, kv, tp)
            prefill(model, cache, prompts)
        return cls(model, sampling, cache)

    @torch.no_grad()
    def turn(self, histories: Sequence[Prompt], dice: Sequence[torch.Generator], version: int) -> Rollout:
        """Responses to these histories, one for each trajectory in order; those of turn 1 are the prompts."""
        for row, history in enumerate(histories):
            self._read(row, history)
        self.cache.wake(torch.tensor([h.next_position for h in histories]))
        last = torch.stack([h.input_ids[-1] for h in histories])
        rollout = _Turn(self.model, self.cache, last, self.sampling, dice, version).until(range(len(dice)))
        self.cache.decoded(rollout.lengths.flatten())
        return rollout

    def _read(self, row: int, history: Prompt) -> None:
        """Run what is new of a history, all but its last token."""
        at = int(self.cache.base[row] + self.cache.stored[row])
        ids = history.input_ids[None, at:-1]
        if not ids.shape[1]:
            return
        language = self.model.model.language_model
        hidden = language.embed_tokens(ids)
        rotary = language.rotary_emb(hidden, history.position_ids[:, None, at:-1])
        reading = _Reading(self.cache, row)
        for layer in language.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary, io=reading)
        self.cache.stored[row] += ids.shape[1]


class _Reading:
    """Stores the keys and values of new tokens of one trajectory, which see its prompt and its own tokens so far."""

    def __init__(self, cache: TrajectoryCache, row: int) -> None:
        self.cache, self.row, self.at = cache, row, int(cache.stored[row])
        prefix = by_layer([cache.prefixes[int(cache.prompt_of[row])]])
        self.pieces: list[list[Piece]] = [
            [*shared, (own[0, row, :, : self.at], own[1, row, :, : self.at])]
            for shared, own in zip(prefix, cache.own, strict=True)
        ]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        stop = self.at + key.shape[2]
        self.cache.own[layer, 0, self.row, :, self.at : stop] = key[0]
        self.cache.own[layer, 1, self.row, :, self.at : stop] = value[0]
        return causal_after(query, key, value, self.pieces[layer], scale)


def rows_of(histories: Histories) -> list[Prompt]:
    """The histories of all trajectories, in the order of the cache's rows."""
    return [history for group in histories.trajectories for history in group]
