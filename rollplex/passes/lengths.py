"""How long responses are, when decode ends, and how many still decode meanwhile: the shape of the decode window.

A response's length is log-normal with the job's median, so wide that the longest of a step's responses is expected to
fill the budget, but no wider than `WIDEST`; F is its distribution, cut at the longest expected length L, n the group.
Per engine, with P prompts of a step:

    full         decode ends at L                      live(t) = P n (1 - F(t))
    oversample   S > P prompts are sampled; decode ends at T, when P groups are complete:  S F(T)^n = P
                                                       live(t) = S n (1 - F(t))
    partial      S > P prompts are in flight, P of them fresh; a group of length L takes ceil(L / T) steps, and as many
                 leave a step as enter it:  S = P E[ceil(L / T)] = P (1 + sum_k 1 - F(kT)^n),  k = 1, 2, ..
                                                       live(t) = P n sum_k (1 - F(kT + t)),  k = 0, 1, ..

A group is complete with its last response: rewards are compared inside it. Without a median all responses fill the
budget, and cutting the tail cuts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist

from rollplex.ir.job import Job
from rollplex.ir.work_schema import WIDEST

BISECTIONS = 50


@dataclass(frozen=True)
class Lengths:
    """Tokens of a response: a log-normal with this median and spread, cut at `longest`; all `longest` without spread.

    Lengths(400, 2048, 0.55).done(400) == 0.5
    """

    median: int
    longest: int
    spread: float

    @classmethod
    def of(cls, job: Job) -> Lengths:
        """Of a job's responses, with the longest that is expected in a step."""
        work = job.workload
        if work.response_median is None or work.response_median >= work.response_tokens:
            return cls(work.response_tokens, work.response_tokens, 0.0)
        batch = work.prompts * work.group
        tail = NormalDist().inv_cdf(1 - 1 / max(batch, 2) / 2)
        spread = min(math.log(work.response_tokens / work.response_median) / tail, WIDEST)
        longest = math.ceil(work.response_median * math.exp(spread * tail) - 1e-6)
        return cls(work.response_median, min(longest, work.response_tokens), spread)

    def done(self, tokens: float) -> float:
        """F: share of responses of at most so many tokens."""
        if tokens >= self.longest:
            return 1.0
        if not self.spread or tokens <= 0:
            return 0.0
        return NormalDist().cdf((math.log(tokens) - math.log(self.median)) / self.spread)

    def longest_of(self, responses: int) -> float:
        """Expected tokens of the longest of so many responses; of a whole step's it is `longest`."""
        if not self.spread:
            return float(self.longest)
        tail = NormalDist().inv_cdf(1 - 1 / max(responses, 2) / 2)
        return min(self.median * math.exp(self.spread * tail), float(self.longest))

    @cached_property
    def mean(self) -> float:
        """Expected tokens of a response."""
        return min(self.median * math.exp(self.spread**2 / 2), float(self.longest))


@dataclass(frozen=True)
class Decode:
    """The decode window of one step: `ends` tokens long."""

    lengths: Lengths
    kind: str
    prompts: int
    sampled: int
    group: int
    engines: int

    @classmethod
    def of(cls, job: Job, per_engine: int | None = None) -> Decode:
        """Of a job's step, or of one round of it in which each engine samples for so many prompts."""
        kind = job.workload.rollout.kind
        sampled = job.sampled if per_engine is None else per_engine * job.engines
        awaited = sampled if kind == "full" else job.workload.prompts
        return cls(Lengths.of(job), kind, awaited, sampled, job.group, job.engines)

    @cached_property
    def ends(self) -> float:
        """T: tokens that a response sampled from the step's beginning has when decode ends."""
        if self.kind == "full" or not self.lengths.spread:
            return float(self.lengths.longest)
        low, high = 0.0, float(self.lengths.longest)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._enough(middle) else (middle, high)
        return high

    def _enough(self, ends: float) -> bool:
        """Whether a window of this length completes the step's prompt groups."""
        if self.kind == "oversample":
            return self.sampled * self.lengths.done(ends) ** self.group >= self.prompts
        unfinished = sum(1 - self.lengths.done(age) ** self.group for age in self._ages(ends) if age)
        return self.prompts * (1 + unfinished) <= self.sampled

    def _ages(self, ends: float) -> Iterator[float]:
        """Tokens that responses in flight can have when a step begins: 0, T, 2T, .. below the budget."""
        steps = math.ceil(self.lengths.longest / max(ends, 1.0))
        return (k * ends for k in range(steps))

    @property
    def snapshots(self) -> int:
        """Snapshots of the weights that the tokens of the longest response come from."""
        return len(list(self._ages(self.ends))) if self.kind == "partial" else 1

    def live(self, tokens: float) -> Iterator[tuple[float, float]]:
        """(responses of one engine, tokens each has) still decoding when the window is so many tokens old."""
        if self.kind == "partial":
            fresh = self.prompts * self.group / self.engines
            for age in self._ages(self.ends):
                yield fresh * (1 - self.lengths.done(age + tokens)), age + tokens
            return
        # Somebody decodes to the end: the window ends with the last response that the step waits for.
        yield max(self.sampled * self.group / self.engines * (1 - self.lengths.done(tokens)), 1.0), tokens

    @property
    def carried_tokens(self) -> float:
        """Own tokens of responses of one engine that go on in this step; weights changed, so no KV is kept."""
        if self.kind != "partial":
            return 0.0
        responses = self.prompts * self.group / self.engines
        return sum(responses * age * (1 - self.lengths.done(age)) for age in self._ages(self.ends))
