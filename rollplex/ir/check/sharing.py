"""A plan's table of sharing: it covers decode, its seconds are those of the surface in the job, nothing is better.

row  at most 24 decode, prefixes of 6000 tokens on 80 SMs      alone 8.0 s  decode 11.3 s  hidden 6.1 s
     the surface at 24, 6000, 80: 1.41 times as slow, 0.54 of the rate      8.0 x 1.41     8.0 x 1.41 x 0.54

Where the search could not prove its table, its bound is the dual: whatever price l a second of prefix work has,

    P1 >= decode + P - l P - sum over rows of the most that a way brings, hidden (1 - l) - cost        0 <= l <= 1

Rows begin where the job's lengths say that so many decode (decoding.py), or as long before the budget as decode is then
told to go on. Where ranks cut a model, prefixes take no less than what they exchange, which was measured too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rollplex.ir.calibration import Surface
from rollplex.ir.check.decoding import beginnings
from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.job import Job
from rollplex.ir.plan import SolverResult
from rollplex.ir.planned_sharing import PolicyRow
from rollplex.ir.work import role_work

ROUNDED_S = 1e-4
"""Rows are rounded to a microsecond, and summed up."""
THIRDS = 80
"""Times that two thirds of an interval are kept: 2/3 to the 80th is 1e-14."""
Way = tuple[int, int]


def check_sharing(facts: Facts, job: Job) -> Iterator[Violation]:
    """The table of a job that has a surface for it; none of one that has not."""
    policy, surface = facts.plan.summary.policy, _surface(job) if facts.plan.summary.policy.kind != "none" else None
    if len(found := _results(facts)) != (policy.kind == "solved"):
        yield _unproven(f"{policy.kind} sharing is solved once if it is solved, and has {len(found)} results")
        return
    if surface is None:
        if policy.rows or policy.surface or policy.mps_s is not None:
            yield _wrong("it has a table, and the job no surface that says so")
        return
    assert job.cluster.calibration
    if policy.surface != job.cluster.calibration.digest:
        yield _wrong(f"it rests on {policy.surface or 'nothing'}, the job's calibration is another")
    if not policy.rows:
        yield _wrong("it has no table, and the job a surface")
        return
    if wrong := list(_form(job, surface, policy.rows)):
        yield from wrong
        return
    yield from _seconds(facts, job, surface, surface.whole(job.workload.typical_prompt) or 0)


def _wrong(what: str) -> Violation:
    return Violation("sharing", what, where="policy")


def _unproven(what: str) -> Violation:
    return Violation("solver", what, where="share-policy")


def _results(facts: Facts) -> list[SolverResult]:
    return [s for s in facts.plan.summary.solvers if s.name == "share-policy"]


def _surface(job: Job) -> Surface | None:
    """Where one decode runs beside prefixes alone, and prompts are about as long as some chunk that was measured."""
    measured, load = job.cluster.calibration, job.workload
    if measured is None or measured.surface is None or load.turns is not None or job.schedule == "streamed":
        return None
    chunk = measured.surface.whole(load.typical_prompt)
    alone = chunk is not None and measured.surface.sms(chunk) == (measured.surface.all_sms,)
    return measured.surface if chunk and not (alone and job.sharing.kind == "fixed") else None


def _form(job: Job, surface: Surface, rows: Sequence[PolicyRow]) -> Iterator[Violation]:
    """Rows cover every batch, each by a way that was measured and that engines have, or that the job states."""
    live, most = [row.live_at_most for row in rows], job.sampled_per_engine[-1] * job.group
    if live[0] != most:
        yield _wrong(f"its first row is for at most {live[0]} responses, {most} of an engine decode at once")
    if any(a <= b for a, b in pairwise(live)):
        yield _wrong(f"its rows are not in the order in which responses end: at most {live}")
    yield from _beginnings(job, rows)
    chunk, share, everything = surface.whole(job.workload.typical_prompt), job.sharing.share, surface.all_sms
    stated = {"mps": {everything}, "fixed": {max(1, round((share or 1.0) * everything))}}
    legal = stated.get(job.sharing.kind, {0, *surface.sms(chunk or 0)})
    for row in rows:
        if row.sms not in legal or row.chunk_tokens != (chunk if row.sms else 0):
            what = f"at most {row.live_at_most}: chunks of {row.chunk_tokens} tokens on {row.sms} SMs; "
            yield _wrong(f"{what}prefixes run whole, {chunk} tokens, on one of {sorted(legal)} SMs")


def _beginnings(job: Job, rows: Sequence[PolicyRow]) -> Iterator[Violation]:
    """There is a row for each batch with which a part of decode begins, and from the token from which it must hold."""
    due, told = beginnings(job), {row.live_at_most: row.from_tokens for row in rows}
    for live, tokens in told.items():
        if live not in due:
            yield _wrong(f"it has a row for at most {live}; parts of decode begin with {', '.join(map(str, due))}")
        elif tokens != due[live]:
            what = f"at most {live}: it holds from token {tokens}; by decode's predicted end and the budget of "
            yield _wrong(f"{what}{job.workload.response_tokens} tokens it must from {due[live]}")
    if missing := sorted(set(due) - set(told), reverse=True):
        yield _wrong(f"it has no row for at most {', '.join(map(str, missing))}, with which a part of decode begins")


def _seconds(facts: Facts, job: Job, surface: Surface, chunk: int) -> Iterator[Violation]:
    """Rows have the surface's seconds and add up to the step's."""
    times, policy = facts.plan.summary.times, facts.plan.summary.policy
    rows, prefix_s = policy.rows, times.prefix_s
    ways = [(row.chunk_tokens, row.sms) for row in rows]
    sampled = sum(w.seconds for w in facts.plan.summary.windows if w.name == "P1 sample")
    if _apart(decode := sum(row.alone_s for row in rows), times.decode_s - sampled):
        yield _wrong(f"its rows have {decode:.6f} s of decode, the step {times.decode_s - sampled:.6f} s")
    for row, (decode_s, hidden_s) in zip(rows, replay(surface, rows, prefix_s, ways), strict=True):
        if _apart(row.decode_s, decode_s) or _apart(row.hidden_s, hidden_s):
            what = f"at most {row.live_at_most}: decode {row.decode_s:.6f} s, {row.hidden_s:.6f} s hidden; "
            yield _wrong(f"{what}the surface gives {decode_s:.6f} s and {hidden_s:.6f} s")
    if prefix_s < (least := exchanged_s(facts, job)) - ROUNDED_S:
        yield _wrong(
            f"its prefixes take {prefix_s:.6f} s, what their ranks exchange was measured to take {least:.6f} s"
        )
    if policy.kind == "solved":
        yield from _solved(facts, surface, chunk, ways)
    elif policy.mps_s is not None:
        yield _wrong(f"{policy.kind} is compared with MPS default")


def _solved(facts: Facts, surface: Surface, chunk: int, ways: Sequence[Way]) -> Iterator[Violation]:
    """What was searched for takes what it is told to, as do MPS default and the bound; no change of a row is better."""
    policy, prefix_s = facts.plan.summary.policy, facts.plan.summary.times.prefix_s
    rows, (told,) = policy.rows, _results(facts)
    own = both_s(surface, rows, prefix_s, ways)
    mps = both_s(surface, rows, prefix_s, [(chunk, surface.all_sms)] * len(rows))
    if policy.mps_s is None or _apart(policy.mps_s, mps):
        yield _wrong(f"MPS default is told to take {policy.mps_s} s, the surface gives {mps:.6f} s")
    if told.objective != "P1 seconds" or _apart(told.value, own):
        yield _unproven(f"{told.objective}: {told.value:.6f}, the table takes P1 {own:.6f} s")
    # That an optimum meets its bound is seen with those of other solvers: numbers.py.
    elif told.status != "optimal" and _apart(told.bound, least := least_s(surface, rows, prefix_s, chunk)):
        yield _unproven(f"its bound is {told.bound:.6f} s, that of all tables {least:.6f} s")
    for better in _others(surface, chunk, ways):
        if (least := both_s(surface, rows, prefix_s, better)) < own - ROUNDED_S:
            yield _wrong(f"it takes {own:.6f} s; another table, {_told(ways, better)}, takes {least:.6f} s")
            return


def exchanged_s(facts: Facts, job: Job) -> float:
    """Seconds in which prefixes only sum hidden states behind `o` and `down`, for roles cut as the policy's trainer."""
    measured, seconds = job.cluster.calibration, 0.0
    if measured is None or measured.exchange is None or not measured.exchange.sums:
        return seconds
    for role in (r for r in job.roles if f"P1 prefix-{r}" in facts.windows):
        work = role_work(job, role)
        if (work.tp, work.pp, work.cp) == (measured.shape.train_tp, 1, 1):
            nbytes = job.workload.typical_prompt * work.spec.hidden * work.itemsize
            seconds += job.prefixes_of(role) * 2 * work.spec.layers * measured.exchange.sum_s(nbytes)
    return seconds


def replay(
    surface: Surface, rows: Sequence[PolicyRow], prefix_s: float, ways: Sequence[Way]
) -> Iterator[tuple[float, float]]:
    """(decode, hidden) seconds of each row if prefixes run in these ways, until none is left."""
    for row, (chunk, sms) in zip(rows, ways, strict=True):
        if not sms:
            yield row.alone_s, 0.0
            continue
        slower, rate = surface.beside(row.live_at_most, chunk, sms)
        beside_s = min(row.alone_s * slower, prefix_s / rate)  # this long prefixes run
        yield row.alone_s + beside_s * (1 - 1 / slower), beside_s * rate
        prefix_s = max(prefix_s - beside_s * rate, 0.0)


def both_s(surface: Surface, rows: Sequence[PolicyRow], prefix_s: float, ways: Sequence[Way]) -> float:
    """Seconds until decode and prefixes have ended."""
    found = list(replay(surface, rows, prefix_s, ways))
    return sum(d for d, _ in found) + max(prefix_s - sum(h for _, h in found), 0.0)


def least_s(surface: Surface, rows: Sequence[PolicyRow], prefix_s: float, chunk: int) -> float:
    """The most that the dual proves: no table takes less. Convex in the price, so thirds find where it is tightest."""
    ways = [
        [(0.0, 0.0), *((row.alone_s * b.slower * b.rate, row.alone_s * (b.slower - 1)) for b in beside)]
        for row in rows
        for beside in [[surface.beside(row.live_at_most, chunk, sms) for sms in surface.sms(chunk)]]
    ]

    def gain(price: float) -> float:
        return price * prefix_s + sum(max(h * (1 - price) - c for h, c in of_row) for of_row in ways)

    low, high = 0.0, 1.0
    for _ in range(THIRDS):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, b) if gain(a) <= gain(b) else (a, high)
    return sum(row.alone_s for row in rows) + prefix_s - gain(low)


def _others(surface: Surface, chunk: int, ways: Sequence[Way]) -> Iterator[list[Way]]:
    """One way throughout, and every change of one row."""
    every = [(0, 0), *((chunk, sms) for sms in surface.sms(chunk))]
    for way in every:
        yield [way] * len(ways)
        yield from ([*ways[:i], way, *ways[i + 1 :]] for i in range(len(ways)))


def _told(ways: Sequence[Way], better: Sequence[Way]) -> str:
    i = next(i for i, (a, b) in enumerate(zip(ways, better, strict=True)) if a != b)
    return f"with {better[i][1]} SMs in row {i + 1}"


def _apart(a: float, b: float) -> bool:
    return abs(a - b) > ROUNDED_S
