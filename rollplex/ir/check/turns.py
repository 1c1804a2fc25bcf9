"""Turns: what an environment makes of one is what the next is sampled from, and what it goes on from is still there.

prompts -> rollout -> history = observe(prompts, rollout) -> rollout.2       kv.2 = prefix(history, kv)
engine   rollout.kv is written by every turn, read by the next      rank   a turn's work reads its piece and all before
Source: paper section 5 (trajectory-aware KV ownership); of a job of one turn nothing is asked here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

from rollplex.ir.check.facts import Facts
from rollplex.ir.check.graph import is_maths
from rollplex.ir.check.rules import Violation
from rollplex.ir.job import Job
from rollplex.ir.plan import NodeRecord, is_observation, references

LARGEST_PAGE = 2 << 20


def chain(facts: Facts) -> Iterator[Violation]:
    """Each turn is sampled once, from what was observed of the turn before; its suffixes read its own responses."""
    graph = {r.name: r for r in facts.plan.graph}
    sampled = [r for r in facts.plan.graph if r.op == "rx.generate"]
    if [facts.turn[r.name] for r in sampled] != list(range(1, len(sampled) + 1)):
        yield Violation("trajectory", f"{len(sampled)} turns are sampled, and they do not follow each other")
    for r in facts.plan.graph:
        values = [graph.get(n) for n in references(r.args)]
        if is_observation(r) and not _follows(values):
            yield Violation("trajectory", "it observes responses that its history did not give", where=f"%{r.name}")
        if is_maths(r) and r.op != "rx.field" and any(v is not None and is_observation(v) for v in values):
            yield Violation("trajectory", "it computes with a history, which is no tensor", where=f"%{r.name}")
        if facts.turns == 1 or not values:
            continue
        if r.op == "rx.prefix" and facts.turn[r.name] > 1 and not _extends(graph, r, values):
            yield Violation("trajectory", "it does not extend the boundary of the turn before", where=f"%{r.name}")
        if r.op == "rx.suffix" and _source(graph, values[0]) != _source(graph, values[-1]):
            yield Violation("trajectory", "its responses were sampled from another history", where=f"%{r.name}")


def _follows(values: list[NodeRecord | None]) -> bool:
    """Whether the second of two values was sampled from the first."""
    if len(values) != 2 or values[0] is None or values[1] is None:
        return False
    return values[1].op == "rx.generate" and next(references(values[1].args), "") == values[0].name


def _extends(graph: dict[str, NodeRecord], r: NodeRecord, values: list[NodeRecord | None]) -> bool:
    """Whether a prefix goes on from one of its role, made of the history that its own begins with."""
    history, before = values[0], values[-1]
    if history is None or before is None or (before.op, before.args[:1]) != ("rx.prefix", r.args[:1]):
        return False
    return _source(graph, before) == next(references(history.args), "")


def _source(graph: dict[str, NodeRecord], record: NodeRecord | None) -> str:
    return next(references(record.args), "") if record else ""


def kept(facts: Facts) -> Iterator[Violation]:
    """Every turn writes what the engine keeps of a trajectory, and a later one reads it."""
    told = facts.plan.summary.trajectories
    for at, step in facts.runs("generate") if told else ():
        later = facts.turn.get(step.node, 1) > 1
        for name in told.kept if told else ():
            if name not in step.writes or (later and name not in step.reads):
                yield Violation("trajectory", f"it does not go on from {name}", at, name)
    for at, step in facts.runs("prefix"):
        turn, pieces = facts.turn.get(step.node, 1), facts.pieces.get(step.role, ())
        for o in (o for i, o in enumerate(pieces, 1) if i != turn and o.name in step.writes):
            yield Violation("trajectory", f"it writes {o.name}, the piece of another turn", at, o.name)


def one_place(facts: Facts) -> Iterator[Violation]:
    """All pieces of a role are of one process, a slot for each prompt group: a trajectory does not change its rank."""
    for role, found in facts.pieces.items():
        asked = sum(r.op == "rx.prefix" and r.args[:1] == (role,) for r in facts.plan.graph)
        if len(found) != asked:
            yield Violation("trajectory", f"its boundary has {len(found)} pieces for {asked} prefixes", where=role)
        for o in found[1:]:
            if (o.process, o.slots) != (found[0].process, found[0].slots):
                what = f"{o.name} has {o.slots} slots on {o.process}, {found[0].name} {found[0].slots} elsewhere"
                yield Violation("trajectory", what, object=o.name, where=o.name)


def told(facts: Facts, job: Job) -> Iterator[Violation]:
    """The summary says so: turns and tokens of the job, pieces and what is kept of the programs."""
    says, load = facts.plan.summary.trajectories, job.workload
    if (says is None) != (load.turns is None) or facts.turns != load.turn_count:
        counted = says.turns if says else 1
        what = f"{counted} turns are told, {facts.turns} sampled; the job has {load.turn_count}"
        yield Violation("trajectory", what, where="summary.trajectories")
        return
    if says is None:
        return
    pieces = {role: ", ".join(o.name for o in found) for role, found in facts.pieces.items()}
    told_of = {role: ", ".join(names) for role, names in says.pieces.items()}
    kv = [n for n in says.kept if n in facts.objects and facts.objects[n].bytes >= job.kv_cache_bytes]
    for what, given, right in (
        ("turns are", says.turns, load.turn_count),
        ("tokens are", says.tokens, load.trajectory_tokens),
        *((f"pieces of {r} are", told_of.get(r, "none"), pieces.get(r, "none")) for r in sorted({*told_of, *pieces})),
    ):
        if given != right:
            yield Violation("trajectory", f"{what} {given}, not {right}", where="summary.trajectories")
    if len(set(says.kept)) != len(says.kept):
        yield Violation("trajectory", "what the engine keeps is named twice", where="summary.trajectories")
    if not kv:
        yield Violation("trajectory", "the engine's KV cache is not among what it keeps", where="summary.trajectories")


def sizes(facts: Facts, job: Job) -> Iterator[Violation]:
    """A later piece holds a response and an observation of every trajectory: 2 layers kv_heads head_dim a token."""
    for role, found in facts.pieces.items():
        degrees = job.degrees(role) if role in job.roles else None
        if degrees is None or degrees.pp > 1 or degrees.cp > 1:
            continue
        token = job.spec_of(role).kv_bytes_per_token(degrees.tp, job.itemsize)
        for o in found[1:]:
            right = o.slots * job.group * job.workload.new_tokens * token
            if not 0 <= o.bytes - right < LARGEST_PAGE:
                what = f"{o.name} has {o.bytes:,} bytes, {o.slots} groups of {job.group} trajectories take {right:,}"
                yield Violation("trajectory", what, object=o.name, nbytes=right, where=o.name)


def times(facts: Facts, job: Job) -> Iterator[Violation]:
    """Seconds turn by turn add up to those of the step; the environment works between turns."""
    t = facts.plan.summary.times
    if len(t.turns) != (facts.turns if facts.turns > 1 else 0):
        yield Violation("times", f"{len(t.turns)} turns are timed, {facts.turns} sampled", where="times")
    for i, (before, after) in enumerate(pairwise(t.turns[1:]), 2):  # in turn 1 the engine prefills the prompts too
        if before.decode_s > after.decode_s + ROUNDED_S:
            what = f"decode of turn {i} takes {before.decode_s:.6f} s, {after.decode_s:.6f} s behind a longer history"
            yield Violation("times", what, where="times")
    for key in ("decode_s", "prefix_s", "interference_s") if t.turns else ():
        whole, parts = getattr(t, key), sum(getattr(u, key) for u in t.turns)
        if abs(whole - parts) > ROUNDED_S:
            yield Violation("times", f"{key} is {whole:.6f}, its turns give {parts:.6f}", where="times")
    if abs(t.environment_s - job.workload.environment_s) > ROUNDED_S:
        yield Violation(
            "times", f"environment_s is {t.environment_s:g}, the job has {job.workload.environment_s:g}", where="times"
        )


ROUNDED_S = 1e-4

CHECKS: tuple[Callable[[Facts], Iterator[Violation]], ...] = (chain, kept, one_place)
ASKED: tuple[Callable[[Facts, Job], Iterator[Violation]], ...] = (told, sizes, times)


def check_turns(facts: Facts) -> Iterator[Violation]:
    """Everything that is wrong with turns; a job that would be refused is told elsewhere."""
    for check in CHECKS:
        yield from check(facts)
    if facts.job is None:
        return
    for against in ASKED:
        yield from against(facts, facts.job)
