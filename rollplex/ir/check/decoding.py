"""How many responses decode when, from the job alone: with which batches and tokens rows of a table of sharing begin.

32 responses of at most 512 tokens, the median 294        at most 32, from token 0 .. at most 5, from 384 .. 1, from 480

Q(t) is the share of responses that have more than t tokens: log-normal with the job's median, so wide that the longest
of a step is expected to fill the budget, and no wider than WIDEST; none is longer than that longest. With S prompts in
flight of which P are awaited, n responses each, decode ends after E tokens, and N(t) responses decode meanwhile:

    full, oversample   S (1 - Q(E))^n = P, for full E is the longest           N(t) = S n Q(t)
    partial            P (1 + sum_k 1 - (1 - Q(kE))^n) = S,  k = 1, 2, ..      N(t) = P n sum_k Q(kE + t), k = 0, 1, ..

Nothing of the passes is in here: of them are only the number of parts and WIDEST, which are assumed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from rollplex.ir.job import Job
from rollplex.ir.planned_sharing import DECODE_PARTS
from rollplex.ir.work_schema import WIDEST

ROUNDED = 1e-9
ROUNDED_TOKENS = 1e-6
HALVINGS = 60


@dataclass(frozen=True)
class Longer:
    """Q, from the median and the standard deviation of the log lengths, none where all fill their budget."""

    median: int
    spread: float
    longest: int

    @classmethod
    def of(cls, job: Job) -> Longer:
        """Of a job's responses."""
        work = job.workload
        median, budget = work.response_median or work.response_tokens, work.response_tokens
        if median >= budget:
            return cls(budget, 0.0, budget)
        last = -NormalDist().inv_cdf(0.5 / max(2, work.prompts * work.group))
        spread = min(WIDEST, math.log(budget / median) / last)
        return cls(median, spread, min(budget, math.ceil(median * math.exp(spread * last) - ROUNDED_TOKENS)))

    def than(self, tokens: float) -> float:
        """Share of responses that have more tokens than these."""
        if not self.spread or tokens <= 0 or tokens >= self.longest:
            return float(tokens < self.longest)
        return math.erfc(math.log(tokens / self.median) / (self.spread * math.sqrt(2))) / 2

    def of_share(self, share: float) -> float:
        """Tokens that this share of responses have at most."""
        if not self.spread or share >= 1:
            return float(self.longest)
        return min(self.median * math.exp(self.spread * NormalDist().inv_cdf(share)), float(self.longest))


@dataclass(frozen=True)
class Decoded:
    """E and N(t) of the last round's decode, on one engine of a job."""

    longer: Longer
    ends: float
    fresh: float
    aged: bool

    @classmethod
    def of(cls, job: Job) -> Decoded:
        """Of a job's step."""
        longer, engines, n = Longer.of(job), job.engines, job.group
        sampled = job.sampled_per_engine[-1] * engines
        kind, awaited = job.workload.rollout.kind, job.workload.prompts
        if kind == "partial":
            return cls(longer, _partial_ends(longer, awaited, sampled, n), awaited * n / engines, True)
        share = (awaited / sampled) ** (1 / n) if kind == "oversample" else 1.0
        return cls(longer, longer.of_share(share), sampled * n / engines, False)

    def live(self, tokens: float) -> float:
        """Responses of the engine that decode when the first of them has so many tokens; one at least does."""
        ages = range(math.ceil(self.longer.longest / self.ends)) if self.aged else (0,)
        return max(1.0, self.fresh * sum(self.longer.than(k * self.ends + tokens) for k in ages))


def _partial_ends(longer: Longer, awaited: int, sampled: int, n: int) -> float:
    """E by halving: the longer a step, the fewer groups it leaves unfinished."""
    if not longer.spread:
        return float(longer.longest)
    low, high = 0.0, float(longer.longest)
    for _ in range(HALVINGS):
        ends = (low + high) / 2
        ages = range(1, math.ceil(longer.longest / max(ends, 1.0)))
        groups = awaited * (1 + sum(1 - (1 - longer.than(k * ends)) ** n for k in ages))
        low, high = (low, ends) if groups <= sampled else (ends, high)
    return high


def beginnings(job: Job) -> dict[int, int]:
    """`from_tokens` of the row for at most so many responses of an engine, in the order of time.

    A part that begins with E - t tokens to go is reached, by the tokens alone, as many before the budget.
    """
    decode, budget = Decoded.of(job), job.workload.response_tokens
    most, found = job.sampled_per_engine[-1] * job.group, dict[int, int]()
    for part in range(DECODE_PARTS):
        begins = decode.ends * part / DECODE_PARTS
        if part:
            most = min(most, math.ceil(decode.live(begins) - ROUNDED))
        found.setdefault(most, math.ceil(budget - (decode.ends - begins) - ROUNDED_TOKENS))
    return found
