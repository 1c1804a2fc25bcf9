"""Decode and prefixes beside each other, from a measured surface: what a way of sharing does in every part of decode.

parts of decode       by itself   ways to run prefix work meanwhile: hidden, cost to decode
1  at most 128 live     21.0 s    wait 0, 0     32 SMs 6.9 s, 7.8 s     80 SMs 12.4 s, 14.2 s     132 SMs 26.1 s, 37.2 s
2  at most  24 live      8.0 s    wait 0, 0     ..
                                  hidden: prefix work that is done, in the seconds that it takes by itself
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rollplex.ir.calibration import Surface
from rollplex.ir.job import Job
from rollplex.ir.planned_sharing import PolicyRow
from rollplex.passes.co_run_search import Option, best_table
from rollplex.passes.costs import Costs
from rollplex.passes.lengths import Decode
from rollplex.passes.work import decoded_bytes


class Way(NamedTuple):
    """How prefix work runs: tokens of a forward, SMs that it may use; zero of both while it waits."""

    chunk_tokens: int
    sms: int


WAIT = Way(0, 0)


@dataclass(frozen=True)
class Part:
    """A part of decode: at most `live` responses of an engine, or `from_tokens` decoded; seconds by itself."""

    live: int
    alone_s: float
    from_tokens: int

    def under(self, surface: Surface, way: Way) -> Option:
        """Prefix work that is hidden if it runs so until the part's end, and what decode then takes longer."""
        if way == WAIT:
            return Option(0.0, 0.0)
        beside = surface.beside(self.live, *way)
        return Option(self.alone_s * beside.slower * beside.rate, self.alone_s * (beside.slower - 1))


@dataclass(frozen=True)
class CoRun:
    """Prefixes of `prefix_s` seconds beside decode, as the rows say; the last of them ends after `prefix_ends_s`."""

    rows: tuple[PolicyRow, ...]
    prefix_s: float
    prefix_ends_s: float
    gap_s: float = 0.0
    """By how much another table could be better, for all that a search has shown."""

    @property
    def hidden_s(self) -> float:
        """Prefix work done while others decode, in the seconds that it takes by itself."""
        return sum(row.hidden_s for row in self.rows)

    @property
    def decode_s(self) -> float:
        """Seconds until decode ends."""
        return sum(row.decode_s for row in self.rows)

    @property
    def interference_s(self) -> float:
        """What the prefixes cost decode."""
        return self.decode_s - sum(row.alone_s for row in self.rows)

    @property
    def left_s(self) -> float:
        """Prefix work that is left when decode has ended."""
        return max(self.prefix_s - self.hidden_s, 0.0)

    @property
    def both_s(self) -> float:
        """Seconds until both have ended."""
        return self.decode_s + self.left_s


def co_run(surface: Surface, parts: Sequence[Part], prefix_s: float, ways: Iterable[Way]) -> CoRun:
    """What comes of one way for each part: prefixes run in the order of time until none is left."""
    left, now, ends, rows = prefix_s, 0.0, 0.0, []
    for part, way in zip(parts, ways, strict=True):
        hidden, cost = part.under(surface, way)
        share = min(1.0, left / hidden) if hidden else 0.0
        done = share * hidden
        rows.append(_row(part, way, part.alone_s + share * cost, done))
        ends = now + share * (part.alone_s + cost) if done else ends
        now += part.alone_s + share * cost
        left = max(left - done, 0.0)
    return CoRun(tuple(rows), prefix_s, now + left if left else ends)


def _row(part: Part, way: Way, decode_s: float, hidden_s: float) -> PolicyRow:
    alone_s, decode_s, hidden_s = (round(s, 6) for s in (part.alone_s, decode_s, hidden_s))
    begins, seconds = {"live_at_most": part.live, "from_tokens": part.from_tokens}, max(alone_s, decode_s)
    return PolicyRow(**begins, **way._asdict(), alone_s=alone_s, decode_s=seconds, hidden_s=hidden_s)


def parts_of(job: Job, decode_s: float) -> tuple[Part, ...]:
    """The parts of the last round's decode, which takes `decode_s` seconds in all; those of equal batches are one.

    The engine's own prefill is in the first.
    """
    prompts = job.sampled_per_engine[-1]
    found, prefill_s = list(_decoding(job, prompts)), Costs(job).prefill_s(job.rollout_tp, prompts)
    stretch = (decode_s - prefill_s) / sum(seconds for seconds, _ in found)
    width = Decode.of(job, prompts).ends / len(found)
    live, parts = prompts * job.group, dict[int, Part]()
    for i, (part_s, decoding) in enumerate(found):
        live = min(live, max(1, math.ceil(decoding - 1e-9))) if i else live
        left = (len(found) - i) * width
        part = parts.get(live) or Part(live, 0.0, math.ceil(job.workload.response_tokens - left - 1e-6))
        own_s = part_s * stretch + (0.0 if i else prefill_s)
        parts[live] = replace(part, alone_s=part.alone_s + own_s)
    return tuple(parts.values())


def _decoding(job: Job, prompts: int) -> Iterator[tuple[float, float]]:
    return Costs(job).decode_parts(decoded_bytes(job), job.rollout_tp, prompts)


def shared(job: Job, decode_s: float, prefix_s: float) -> CoRun | None:
    """Decode and prefixes as the job's sharing has it; None where nothing was measured of them beside each other."""
    if (surface := surface_of(job)) is None or not decode_s:
        return None
    parts = parts_of(job, decode_s)
    if job.sharing.kind == "solved":
        return solved(surface, parts, prefix_s, runnable(job, surface))
    return co_run(surface, parts, prefix_s, [_stated(job, surface)] * len(parts))


def under_mps(job: Job, decode_s: float, prefix_s: float) -> CoRun | None:
    """The same with both sides taking what the other leaves idle."""
    if (surface := surface_of(job)) is None or not decode_s:
        return None
    parts = parts_of(job, decode_s)
    return co_run(surface, parts, prefix_s, [Way(_whole(job, surface), surface.all_sms)] * len(parts))


def surface_of(job: Job) -> Surface | None:
    """The surface that the job's prefixes and decode are told by: one decode a step, no training beside it.

    It must have whole prompts of about the job's length; for a fixed share, partitions.
    """
    measured = job.cluster.calibration
    surface = measured.surface if measured else None
    fits = job.overlapped and job.schedule != "streamed" and job.workload.turns is None
    chunk = surface.whole(job.workload.typical_prompt) if surface and fits else None
    if surface is None or chunk is None:
        return None
    return surface if job.sharing.kind != "fixed" or len(surface.sms(chunk)) > 1 else None


def runnable(job: Job, surface: Surface) -> tuple[Way, ...]:
    """Ways that engines have today: a prefix runs whole, prompt by prompt, on any number of SMs."""
    chunk = _whole(job, surface)
    return tuple(Way(chunk, sms) for sms in surface.sms(chunk))


def _stated(job: Job, surface: Surface) -> Way:
    """The same way all the time: MPS default, or a share of the SMs."""
    share = job.sharing.share
    return Way(_whole(job, surface), max(1, round(share * surface.all_sms)) if share else surface.all_sms)


def _whole(job: Job, surface: Surface) -> int:
    chunk = surface.whole(job.workload.typical_prompt)
    assert chunk, "the surface has chunks of about a prompt's length"
    return chunk


def solved(surface: Surface, parts: Sequence[Part], prefix_s: float, ways: Sequence[Way]) -> CoRun:
    """The table of ways under which decode and prefixes end first."""
    every = (WAIT, *ways)
    best = best_table(tuple(tuple(part.under(surface, way) for way in every) for part in parts), prefix_s)
    return replace(co_run(surface, parts, prefix_s, [every[m] for m in best.table]), gap_s=best.gap)
