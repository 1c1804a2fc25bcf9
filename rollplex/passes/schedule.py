"""Cut an iteration into windows: which engine runs what between two barriers (paper section 3.1, figure 1).

    rollplex   P1 prefix-reference | P1 prefix-actor | P1 decode    ||  P2 score-reference | P2 train-actor  ||  P3 ..
               (the rollout engine decodes through all three)
    serial     P1 decode  ||  P2 prefix-reference | P2 score-reference | P2 prefix-actor | P2 train-actor    ||  P3 ..
    naive      as rollplex, with everything resident all the time
    disaggregated   as serial, with rollout on GPUs of its own: they wait in P2, the training GPUs in P1 (section 4.2)

`||` are the barriers rollout-complete and theta-quiet; `published` ends the iteration. A window is the unit of
lifetime analysis; the trainer runs one window after the other, the rollout engine runs through those of phase P1.
Several trained roles follow each other: .. | P2 train-critic | P2 train-actor || P3 update-critic | P3 update | ..
With dynamic sampling `P1 sample` comes first: all rounds but the last, which alone runs beside prefixes of kept groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.job_schema import OVERLAPPED
from rollplex.ir.module import Module
from rollplex.passes.calls import Call, CallKind, check_calls, in_order, inputs_of, model_calls
from rollplex.passes.prefix_split import Split

Kind = Literal["prefix", "decode", "score", "train", "update", "publish"]
Phase = Literal["P1", "P2", "P3"]


@dataclass(frozen=True)
class Window:
    """The time between two barriers or residency changes; `node` is the graph node whose work fills it."""

    name: str
    phase: Phase
    kind: Kind
    node: str
    role: str


@dataclass(frozen=True)
class Schedule:
    """Windows in the trainer's order, the calls behind them, and the host functions between.

    `inputs` are the values made elsewhere that a call or a host function needs; `early` are the host functions that no
    response is needed for.
    """

    made_by: ClassVar[str] = "schedule"
    kind: str
    windows: tuple[Window, ...]
    calls: tuple[Call, ...]
    hosts: tuple[str, ...]
    phases: dict[str, str]
    inputs: dict[str, tuple[str, ...]]
    early: frozenset[str] = frozenset()

    @property
    def overlapped(self) -> bool:
        """Whether prefixes run beside decode."""
        return self.kind in OVERLAPPED

    def names(self, *kinds: Kind, phase: str = "", role: str = "") -> tuple[str, ...]:
        """Names of the windows of these kinds (all kinds if none is given), phase and role, in order."""
        found = (w for w in self.windows if (not kinds or w.kind in kinds) and phase in ("", w.phase))
        return tuple(w.name for w in found if role in ("", w.role))

    @property
    def decode_windows(self) -> tuple[str, ...]:
        """Windows during which the rollout engine may be decoding."""
        return self.names(phase="P1")

    @property
    def generate(self) -> Call:
        """The call that samples responses."""
        return next(c for c in self.calls if c.op == "generate")

    @property
    def trained(self) -> tuple[str, ...]:
        """Roles in the order of their updates; the policy's is the last."""
        return tuple(w.role for w in self.windows if w.kind == "update")

    def call(self, op: CallKind, role: str) -> Call | None:
        """The role's call of this kind, if it has one."""
        return next((c for c in self.calls if c.op == op and c.role == role), None)

    def __str__(self) -> str:
        return "\n".join(f"{w.name:<24} {w.node}" for w in self.windows)


def windows_of(
    calls: list[Call], ordered: list[Call], kind: str, rounds: int = 1, awaited: bool = True
) -> list[Window]:
    """The windows of a schedule; `ordered` are the scoring and training calls, frozen roles first where they may be.

    Prefixes of frozen roles come before those of trained ones, so that their weights leave early. Where not every
    prompt is awaited, calls that leave no boundary are made when it is known which prompts a step takes.
    """
    prefixes = sorted((c for c in calls if c.op == "prefix"), key=lambda c: c.trained)
    decode = Window("P1 decode", "P1", "decode", next(c.node for c in calls if c.op == "generate"), "")
    before = [replace(decode, name="P1 sample")] if rounds > 1 else []
    if kind not in OVERLAPPED:
        behind = [w for c in ordered for w in _with_prefix(c, prefixes)]
        return [*before, decode, *behind, *_updates(calls)]
    early = [c for c in ordered if awaited and _in_p1(c)]
    first = [*before, *(_prefix(c, "P1") for c in prefixes), *(_work(c, "P1") for c in early)]
    return [*first, decode, *(_work(c, "P2") for c in ordered if c not in early), *_updates(calls)]


def _in_p1(call: Call) -> bool:
    """A frozen role's call that no response is needed for; a trained role's waits for its loss."""
    return call.op == "whole" and call.early and not call.trained


def _with_prefix(call: Call, prefixes: list[Call]) -> list[Window]:
    return [*(_prefix(p, "P2") for p in prefixes if p.node == call.boundary), _work(call, "P2")]


def _prefix(call: Call, phase: Phase) -> Window:
    return Window(f"{phase} prefix-{call.role}", phase, "prefix", call.node, call.role)


def _work(call: Call, phase: Phase) -> Window:
    kind: Kind = "train" if call.trained else "score"
    return Window(f"{phase} {kind}-{call.role}", phase, kind, call.node, call.role)


def _updates(calls: list[Call]) -> list[Window]:
    """Roles that nobody samples from first: the policy's update goes on into its publication."""
    policy = next(c.role for c in calls if c.op == "generate")
    updates = [c for c in calls if c.op == "update"]
    windows = [Window(f"P3 update-{c.role}", "P3", "update", c.node, c.role) for c in updates if c.role != policy]
    for call in (c for c in updates if c.role == policy):
        windows.append(Window("P3 update", "P3", "update", call.node, policy))
        windows.append(Window("P3 publish", "P3", "publish", call.node, policy))
    return windows


def phases_of(graph: fx.Graph, windows: list[Window], early: frozenset[str]) -> dict[str, str]:
    """Phase of every node: of its window, else P2 (loss maths); inputs and early host functions in P1."""
    phases = {n.name: "P2" for n in graph.nodes}
    phases |= {n.name: "P1" for n in graph.nodes if n.op == "placeholder" or n.name in early}
    phases |= {w.node: w.phase for w in windows}
    return phases


@dataclass(frozen=True)
class SchedulePass:
    """Arrange the split calls into phases, windows and barriers under the job's schedule.

    Job keys: `schedule`.
    """

    name: ClassVar[str] = "schedule"
    needs: ClassVar[tuple[type, ...]] = (Split,)
    makes: ClassVar[type] = Schedule

    def run(self, module: Module) -> Module:
        """Order the calls; see the module's docstring."""
        graph, job = module.graph, module.job
        calls = model_calls(graph)
        check_calls(graph, calls, job.trained)
        rounds, awaited = len(job.sampled_per_engine), job.workload.rollout.kind == "full"
        windows = windows_of(calls, in_order(graph, calls), job.schedule, rounds, awaited)
        late, hosts = g.response_dependent(graph), g.find(graph, ops.host)
        early = frozenset(n.name for n in hosts if n not in late)
        return module.put(
            Schedule(
                kind=job.schedule,
                windows=tuple(windows),
                calls=tuple(calls),
                hosts=tuple(n.name for n in hosts),
                phases=phases_of(graph, windows, early),
                inputs=inputs_of(graph, calls),
                early=early,
            )
        )
