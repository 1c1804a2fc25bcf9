"""Values between the controller and the ranks of an engine: parts of several ranks become one, and go out to many.

rollout 0 .. 3 signal `rollout`, each with its engine's prompts     ->  one Rollout of all prompts, in their order
the controller signals `prompts`                                    ->  each rank: all tokens, its own prompts' patches
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from statistics import fmean
from typing import Any

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.engine import EngineReport, Values
from rollplex.ir.errors import EngineError
from rollplex.ir.job import Job
from rollplex.ir.placement import seat
from rollplex.runtime.protocol import CONTROLLER, ProcessId


def gathered(job: Job, parts: Mapping[ProcessId, Values]) -> Values:
    """One event's values from those of all ranks that signalled it; EngineError where ranks of an engine disagree."""
    first = next(iter(parts.values()))
    if len(parts) == 1:
        return first
    return {name: _joined(job, name, {p: values[name] for p, values in parts.items()}) for name in first}


def _joined(job: Job, name: str, parts: Mapping[ProcessId, Any]) -> Rollout:
    seats = {process: seat(job, process.kind, process.rank) for process in parts}
    spoken: dict[int, tuple[ProcessId, Rollout]] = {}
    for process in sorted(parts, key=lambda p: seats[p].tp):
        value, copy = parts[process], seats[process].copy
        assert isinstance(value, Rollout), f"{process} signals {name}, of which ranks have no parts"
        other, said = spoken.setdefault(copy, (process, value))
        if not value.same_as(said):
            what = f"{process} and {other} are ranks of one engine and sampled other tokens"
            raise EngineError(what, where=f"%{name}", hint="their weights or seeds differ: report this with both logs")
    return Rollout.joined([spoken[copy][1] for copy in sorted(spoken)])


def seen_by(job: Job, process: ProcessId, values: Values) -> Values:
    """What a process is sent of an event's values."""
    if process == CONTROLLER:
        return values
    own = seat(job, process.kind, process.rank).sampled
    found = {name: value for name, value in values.items() if isinstance(value, PromptBatch)}
    sampled = process.kind == "rollout"  # of what a round is not for it has the responses already
    return values | {n: value.seen_by(value.sampled_for(own) if sampled else own) for n, value in found.items()}


def merged_metrics(reports: Iterable[EngineReport]) -> dict[str, float]:
    """The metrics of a step from those of all processes: sums added up, all others averaged."""
    values: dict[str, list[float]] = {}
    parts: dict[str, list[float]] = {}
    for report in reports:
        for into, found in ((values, report.metrics), (parts, report.sums)):
            for name, value in found.items():
                into.setdefault(name, []).append(value)
    return {n: sum(v) for n, v in parts.items()} | {n: fmean(v) for n, v in values.items()}


def agreed_digests(job: Job, answers: Mapping[ProcessId, Mapping[str, str]]) -> dict[str, str]:
    """The digests of all state by name; EngineError where copies of the model differ.

    A part of a tensor-parallel rank after the first is `name.tp1`; what engines sampled is one digest of all.
    """
    found: dict[str, str] = {}
    owners: dict[str, ProcessId] = {}
    sampled = [""] * job.engines
    for process in sorted(answers, key=lambda p: (p.kind, p.rank)):
        here = seat(job, process.kind, process.rank)
        for name, value in answers[process].items():
            if process.kind == "rollout":
                sampled[here.copy] = value
                continue
            key = name if here.speaks else f"{name}.tp{here.tp}"
            if found.setdefault(key, value) != value:
                what = f"{process} and {owners[key]} hold copies of {key} that differ"
                raise EngineError(what, where="digests", hint="their updates differ: report this with both logs")
            owners.setdefault(key, process)
    found["rollouts"] = sampled[0] if len(sampled) == 1 else sha256("".join(sampled).encode()).hexdigest()
    return found
