"""Figures that rest on each other: equation 1, the windows' seconds, chunk and workspace bytes, proven bounds.

serial = decode + prefix + post + exposed            step = max(decode + interference, prefix / share) + post + exposed
speedup = serial / step                              bound = min(prefix - interference, decode), at least 0
Under `streamed` a step is less by the work behind decode that is done before decode ends.
Where a table of sharing tells how prefixes run: step = decode + interference + what is left of prefixes behind it + ..
Of several turns step and bound are sums over them, and the environment's seconds lie between.
Source: paper section 3.1, equation 1. Seconds are predicted; what is checked is that they agree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.check.update import Update, state_itemsize, updates
from rollplex.ir.planned_turns import TurnTimes
from rollplex.ir.steps import Publish, Rebuild, UpdateChunk

ROUNDED_S = 1e-4
"""Each figure is rounded to a microsecond, and dozens of windows are summed up."""
EQUATION_1 = ("rollplex", "streamed", "naive")
"""Schedules that run prefixes beside decode; the others run one after the other."""


def times(facts: Facts) -> Iterator[Violation]:
    """The times of a step are those of its parts."""
    t, share = facts.plan.summary.times, facts.plan.summary.policy.share or 1.0
    rest = t.post_s + t.exposed_transfer_s + t.environment_s
    tail, beside = facts.plan.summary.tail, facts.plan.schedule in EQUATION_1
    # Before it is known which prompts a step takes, prefixes are for all that are sampled.
    taken = tail.taken / max(tail.sampled, 1) if tail and beside else 1.0
    serial = t.decode_s + taken * t.prefix_s + rest
    # Rounds of dynamic sampling before the last have their window to themselves.
    alone = sum(w.seconds for w in facts.plan.summary.windows if w.name == "P1 sample")
    once = TurnTimes(decode_s=max(0.0, t.decode_s - alone), prefix_s=t.prefix_s, interference_s=t.interference_s)
    turns = t.turns or (once,)
    together = alone + _p1(facts, turns, share) + rest - t.hidden_post_s
    bound = sum(max(0.0, min(u.prefix_s - u.interference_s, u.decode_s)) for u in turns)
    yield from _hidden(facts)
    yield from _interference(facts)
    if facts.plan.schedule != "disaggregated":  # whose serial schedule is another, on all GPUs
        yield from _same("serial_s", t.serial_s, serial)
    yield from _same("step_s", t.step_s, together if beside else serial)
    yield from _same("saving_bound_s", t.saving_bound_s, bound)
    if not beside and t.interference_s:
        yield Violation("times", "decode is slowed down by prefixes that run after it", where="times")
    if t.step_s:
        yield from _same("speedup_vs_serial", t.speedup_vs_serial, t.serial_s / t.step_s)
    yield from _same("the windows' seconds", sum(w.seconds for w in facts.plan.summary.windows), t.step_s)


def _p1(facts: Facts, turns: Sequence[TurnTimes], share: float) -> float:
    """Decode and prefixes beside each other: as a table of sharing has it, or the longer of both."""
    if not (policy := facts.plan.summary.policy).rows:
        return sum(max(u.decode_s + u.interference_s, u.prefix_s / share) for u in turns)
    return sum(u.decode_s + u.interference_s + max(u.prefix_s - policy.hidden_s, 0.0) for u in turns)


def _interference(facts: Facts) -> Iterator[Violation]:
    """By a table of sharing decode is slowed down in its rows."""
    if rows := facts.plan.summary.policy.rows:
        slower = sum(row.decode_s - row.alone_s for row in rows)
        yield from _same("interference_s", facts.plan.summary.times.interference_s, slower)


def _hidden(facts: Facts) -> Iterator[Violation]:
    """Only `streamed` hides work behind decode: of all groups but the last, whose own is what P2's windows take."""
    t, streamed = facts.plan.summary.times, facts.plan.schedule == "streamed"
    if t.hidden_post_s and not streamed:
        yield Violation("times", f"{facts.plan.schedule} hides {t.hidden_post_s:.6f} s behind decode", where="times")
    if t.streamed_s is not None and (facts.plan.schedule != "rollplex" or not t.streamed_s):
        yield Violation(
            "times", f"{facts.plan.schedule} is told a step of {t.streamed_s:.6f} s streamed", where="times"
        )
    if not streamed:
        return
    groups = max(s.microbatch for _, s in facts.runs("train"))
    last = sum(w.seconds for w in facts.plan.summary.windows if w.phase == "P2")
    most = min(groups * last, t.decode_s + t.interference_s, t.post_s)
    if t.hidden_post_s > most + ROUNDED_S * max(1.0, most):
        what = f"{t.hidden_post_s:.6f} s are hidden, at most {most:.6f} of {groups} groups can be"
        yield Violation("times", what, where="times")


def publication(facts: Facts) -> Iterator[Violation]:
    """Publishing takes the seconds that the layout says: the exchange, and the rebuild of what engines do not share."""
    layout, exposed = facts.plan.summary.layout, facts.plan.summary.times.exposed_transfer_s
    rebuilt = any(isinstance(at.step, Rebuild) for at in facts.steps())
    least = layout.exchange_s + (sum(c.rebuild_s for c in layout.classes) if rebuilt else 0.0)
    published, updated = (
        {at.step.window for at in facts.steps() if isinstance(at.step, kind)} for kind in (Publish, UpdateChunk)
    )
    # A role that nobody samples from is published where it is updated.
    for w in (w for w in facts.plan.summary.windows if w.name in published - updated):
        if not least - ROUNDED_S <= w.seconds <= least + exposed + ROUNDED_S:
            what = f"{w.name} takes {w.seconds:.6f} s, exchange and rebuild {least:.6f}"
            yield Violation("times", what, where=w.name)


def _same(what: str, told: float, right: float) -> Iterator[Violation]:
    if abs(told - right) > ROUNDED_S * max(1.0, abs(right) * 1e-3):
        yield Violation("times", f"{what} are {told:.6f}, their parts give {right:.6f}", where="times")


def chunks(facts: Facts) -> Iterator[Violation]:
    """A chunk has gradient, master weight and two moments of its elements; its pipeline is what a workspace holds."""
    for u in updates(facts):
        planned = facts.plan.summary.chunks.of(u.role)
        if planned.bytes != planned.elements * 4 * state_itemsize(facts):
            what = f"{planned.elements:,} elements have {planned.bytes:,} bytes of gradient, master weight and moments"
            yield Violation("chunk-size", what, nbytes=planned.bytes, where=u.role)
        found = sum(facts.objects[name].bytes for name in _workspaces(u))
        if planned.workspace_bytes != found:
            what = f"workspace_bytes are {planned.workspace_bytes:,}, the chunks' workspaces have {found:,}"
            yield Violation("chunk-size", what, nbytes=found, where=u.role)
    for role in sorted(set(facts.plan.summary.chunks.others) - set(facts.trained)):
        yield Violation("chunk-size", "chunks are planned of a role that is not updated", where=role)


def _workspaces(u: Update) -> set[str]:
    """Phase-local objects that chunks write, gradients left out."""
    written = {n for _, chunk in u.chunks for n in chunk.writes} - set(u.facts.gradients(u.role))
    return {n for n in written if u.facts.objects[n].class_ == "phase-local"}


def microbatches(facts: Facts) -> Iterator[Violation]:
    """A prefix task takes one prompt; the workspaces are objects of those bytes."""
    planned = facts.plan.summary.chunks.microbatch
    if planned.prefix_prompts != 1:
        what = f"{planned.prefix_prompts} prompts a prefix step, a task runs one group"
        yield Violation("chunk-size", what, where="microbatch")
    match facts.plan.job:
        case {"workload": {"group": int(group)}} if planned.suffix_responses < 1 or group % planned.suffix_responses:
            what = f"{planned.suffix_responses} responses a suffix step do not divide a group of {group}"
            yield Violation("chunk-size", what, where="microbatch")
        case _:
            pass
    solved = {s.objective: s.value for s in facts.plan.summary.solvers}
    match facts.plan.job:
        case {"workload": {"group": int(group)}} if planned.suffix_responses > 0:
            if solved.get("suffix steps a group", group) != group // planned.suffix_responses:
                what = f"{planned.suffix_responses} responses a suffix step, the solver took another number"
                yield Violation("chunk-size", what, where="microbatch")
        case _:
            pass
    written = {n for _, s in facts.runs("suffix", "whole", "train") for n in s.writes}
    taken = {n for role in facts.trained for n in facts.gradients(role)}
    released = {o.name for o in facts.objects.values() if o.class_ == "phase-local" and o.produced != "start"}
    workspaces = (written - taken) & released
    for name in sorted(workspaces - set(planned.workspace_bytes)):
        what = f"{name} is written by suffix steps, and left out"
        yield Violation("chunk-size", what, object=name, where="microbatch")
    for name, nbytes in planned.workspace_bytes.items():
        if name not in facts.objects or facts.objects[name].bytes != nbytes:
            what = f"{name} is planned with {nbytes:,} bytes, the contract has another"
            yield Violation("chunk-size", what, object=name, nbytes=nbytes, where="microbatch")


def bounds(facts: Facts) -> Iterator[Violation]:
    """An optimum meets its bound, anything else is told as not proven; an objective is solved once."""
    for (name, objective), count in Counter((s.name, s.objective) for s in facts.plan.summary.solvers).items():
        if count > 1:
            yield Violation("solver", f"{objective} is solved {count} times", where=name)
    for s in facts.plan.summary.solvers:
        if s.value < s.bound:
            yield Violation("solver", f"{s.objective}: {s.value:g} is better than its bound {s.bound:g}", where=s.name)
        elif (s.value == s.bound) != (s.status == "optimal"):
            yield Violation("solver", f"{s.objective}: {s.value:g} of {s.bound:g} is {s.status}", where=s.name)


CHECKS: tuple[Callable[[Facts], Iterator[Violation]], ...] = (times, publication, chunks, microbatches, bounds)


def check_numbers(facts: Facts) -> Iterator[Violation]:
    """Everything that does not add up."""
    for check in CHECKS:
        yield from check(facts)
