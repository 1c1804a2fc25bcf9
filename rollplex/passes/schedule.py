"""Cut an iteration into windows: which engine runs what between two barriers (paper section 3.1, figure 1).

    rollplex   P1 prefix-reference | P1 prefix-actor | P1 decode    ||  P2 score-reference | P2 train-actor  ||  P3 ..
               (the rollout engine decodes through all three)
    streamed   P1 prefix-reference | P1 prefix-actor | P1 stream    ||  P2 score-reference | P2 train-actor  ||  P3 ..
               (groups that are complete are scored and trained on beside the decode of the others; P2 is for the last)
    serial     P1 decode  ||  P2 prefix-reference | P2 score-reference | P2 prefix-actor | P2 train-actor    ||  P3 ..
    naive      as rollplex, with everything resident all the time
    disaggregated   as serial, with rollout on GPUs of its own: they wait in P2, the training GPUs in P1 (section 4.2)

A trained role whose prefix runs with its group (`prefix_saved: group`) has no window for its prefixes:
    serial     P1 decode  ||  P2 prefix-reference | P2 score-reference | P2 train-actor (prefix 0, train 0, ..)

`||` are the barriers rollout-complete and theta-quiet; `published` ends the iteration. A window is the unit of
lifetime analysis; the trainer runs one window after the other, the rollout engine runs through those of phase P1.
Several trained roles follow each other: .. | P2 train-critic | P2 train-actor || P3 update-critic | P3 update | ..
With dynamic sampling `P1 sample` comes first: all rounds but the last, which alone runs beside prefixes of kept groups.
Turns follow each other: P1 prefix-actor | P1 decode | P1 prefix-actor.2 | P1 decode.2 || .. the environment between
them makes of a turn's responses what the next turn's prefixes extend; P2 scores and trains on all turns at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError
from rollplex.ir.job_schema import OVERLAPPED
from rollplex.ir.loss import couples_step
from rollplex.ir.module import Module
from rollplex.ir.planned_turns import turned
from rollplex.passes.calls import SCORING, Call, CallKind, check_calls, in_order, inputs_of, model_calls
from rollplex.passes.prefix_split import Split
from rollplex.passes.rounds import SamplingRounds, rounds_of

Kind = Literal["prefix", "decode", "stream", "score", "train", "update", "publish"]
Phase = Literal["P1", "P2", "P3"]


@dataclass(frozen=True)
class Window:
    """The time between two barriers or residency changes; `node` is the graph node whose work fills it.

    Of several turns a role scores or trains in one window, `node` being that of the first.
    """

    name: str
    phase: Phase
    kind: Kind
    node: str
    role: str
    turn: int = 1


@dataclass(frozen=True)
class Schedule:
    """Windows in the trainer's order, the calls behind them, and the host functions between.

    `inputs` are the values made elsewhere that a call or a host function needs; `early` are the host functions that no
    response is needed for, `observations` those that make the prompts of turn 2, 3, ..; `rounds` where groups are
    sampled again.
    """

    made_by: ClassVar[str] = "schedule"
    kind: str
    windows: tuple[Window, ...]
    calls: tuple[Call, ...]
    hosts: tuple[str, ...]
    phases: dict[str, str]
    inputs: dict[str, tuple[str, ...]]
    early: frozenset[str] = frozenset()
    observations: tuple[str, ...] = ()
    rounds: SamplingRounds | None = None

    @property
    def overlapped(self) -> bool:
        """Whether prefixes run beside decode."""
        return self.kind in OVERLAPPED

    def names(self, *kinds: Kind, phase: str = "", role: str = "") -> tuple[str, ...]:
        """Names of the windows of these kinds (all kinds if none is given), phase and role, in order."""
        found = (w for w in self.windows if (not kinds or w.kind in kinds) and phase in ("", w.phase))
        return tuple(w.name for w in found if role in ("", w.role))

    @property
    def stream(self) -> Window | None:
        """The window in which groups are trained on while others decode."""
        return next((w for w in self.windows if w.kind == "stream"), None)

    @property
    def streaming(self) -> tuple[Window, ...]:
        """The windows of P2 whose work is done group by group in the stream, but for the last group."""
        return tuple(w for w in self.windows if w.phase == "P2" and w.kind in ("score", "train") and self.stream)

    def works_in(self, role: str, kind: Kind) -> bool:
        """Whether a role's work of a kind is done in the stream too."""
        return any((w.role, w.kind) == (role, kind) for w in self.streaming)

    @property
    def decode_windows(self) -> tuple[str, ...]:
        """Windows during which the rollout engine may be decoding."""
        return self.names(phase="P1")

    @property
    def generates(self) -> tuple[Call, ...]:
        """The calls that sample responses, one a turn."""
        return tuple(c for c in self.calls if c.op == "generate")

    @property
    def turns(self) -> range:
        """The turns of a trajectory: 1, 2, .."""
        return range(1, len(self.generates) + 1)

    def turn_windows(self, turn: int) -> tuple[str, ...]:
        """Windows of phase P1 in which the rollout engine works on a turn."""
        return tuple(w.name for w in self.windows if w.phase == "P1" and w.turn == turn)

    def prefixes(self, role: str) -> tuple[Call, ...]:
        """The prefixes of a role, one a turn."""
        return tuple(sorted((c for c in self.calls if c.op == "prefix" and c.role == role), key=lambda c: c.turn))

    def work(self, window: Window) -> tuple[Call, ...]:
        """The calls that fill a window, one a turn where a role scores or trains."""
        if window.kind not in ("score", "train"):
            return tuple(c for c in self.calls if c.node == window.node)
        mine = (c for c in self.calls if c.op in SCORING and c.role == window.role)
        return tuple(sorted(mine, key=lambda c: c.turn))

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
    calls: list[Call],
    ordered: list[Call],
    kind: str,
    rounds: int = 1,
    awaited: bool = True,
    with_group: frozenset[str] = frozenset(),
) -> list[Window]:
    """The windows of a schedule; `ordered` are the scoring and training calls, frozen roles first where they may be.

    Prefixes of frozen roles come before those of trained ones, so that their weights leave early. Where not every
    prompt is awaited, calls that leave no boundary are made when it is known which prompts a step takes. Roles
    `with_group` run their prefixes where they train.
    """
    apart = (c for c in calls if c.op == "prefix" and c.role not in with_group)
    prefixes = sorted(apart, key=lambda c: (c.turn, c.trained))
    decode = [
        Window(turned("P1 decode", c.turn), "P1", "decode", c.node, "", c.turn) for c in calls if c.op == "generate"
    ]
    before = [replace(decode[0], name="P1 sample")] if rounds > 1 else []
    if kind == "streamed":
        decode = [replace(w, name="P1 stream", kind="stream") for w in decode]
    once = list({c.role: c for c in reversed(ordered)}.values())[::-1]
    if kind not in OVERLAPPED:
        behind = [w for c in once for w in _with_prefix(c, prefixes)]
        return [*before, *decode, *behind, *_updates(calls)]
    early = [c for c in once if awaited and _in_p1(c)]
    first = {1: [*before, *(_prefix(c, "P1") for c in prefixes if c.turn == 1), *(_work(c, "P1") for c in early)]}
    rest = {w.turn: [_prefix(c, "P1") for c in prefixes if c.turn == w.turn] for w in decode[1:]}
    turns = [w for last in decode for w in [*(first | rest)[last.turn], last]]
    return [*turns, *(_work(c, "P2") for c in once if c not in early), *_updates(calls)]


def _in_p1(call: Call) -> bool:
    """A frozen role's call that no response is needed for; a trained role's waits for its loss."""
    return call.op == "whole" and call.early and not call.trained


def _with_prefix(call: Call, prefixes: list[Call]) -> list[Window]:
    own = (p for p in prefixes if call.boundaries and p.role == call.role)
    return [*(_prefix(p, "P2") for p in own), _work(call, "P2")]


def _prefix(call: Call, phase: Phase) -> Window:
    name = turned(f"{phase} prefix-{call.role}", call.turn)
    return Window(name, phase, "prefix", call.node, call.role, call.turn)


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
    """Phase of every node: of its window, else P2 (loss maths, a role's later turns); what is early in P1."""
    phases = {n.name: "P2" for n in graph.nodes}
    phases |= {n.name: "P1" for n in graph.nodes if n.op == "placeholder" or n.name in early}
    phases |= {w.node: w.phase for w in windows}
    return phases


def check_turns(graph: fx.Graph, calls: list[Call], asked: int) -> None:
    """The algorithm has as many turns as the job; GraphError names both."""
    found = [g.node_named(graph, c.node) for c in calls if c.op == "generate"]
    if len(found) != asked:
        has = f"the job has workload.turns.count={asked}" if asked > 1 else "the job has no workload.turns"
        fewer = "workload.turns=null" if len(found) == 1 else f"workload.turns.count={len(found)}"
        hint = fewer if asked > 1 else "workload: {turns: {count: .., observation_tokens: ..}} in the job"
        several = f"{len(found)} turns" if len(found) > 1 else "one turn"
        raise GraphError(f"the algorithm samples {several}, {has}", where=g.loc(found[-1]), hint=hint)


def check_with_group(graph: fx.Graph, calls: list[Call], roles: frozenset[str]) -> None:
    """A role whose prefix runs with its group has one; GraphError names the call that is not split."""
    for call in (c for c in calls if c.op == "whole" and c.role in roles):
        what = f"roles.{call.role}.prefix_saved is group, and %{call.node} is not split into a prefix and a suffix"
        raise GraphError(what, where=g.loc(g.node_named(graph, call.node)), hint=f"roles.{call.role}.prefix_saved=auto")


def updated_roles(calls: list[Call]) -> tuple[str, ...]:
    """The trained roles, as calls name them."""
    return tuple(c.role for c in calls if c.op == "update")


def check_streamed(graph: fx.Graph, roles: tuple[str, ...]) -> None:
    """No loss needs the responses of all groups before the last has ended; GraphError names the op that does."""
    for role in roles:
        if (found := couples_step(graph, role)) is None:
            continue
        node, why = found
        what = (
            f"schedule streamed trains on a group while others decode, and %{node.name} = {g.record_name(node)} {why}"
        )
        raise GraphError(what, where=g.loc(node), hint="schedule=rollplex, or statistics within a group")


@dataclass(frozen=True)
class SchedulePass:
    """Arrange the split calls into phases, windows and barriers under the job's schedule.

    Job keys: `schedule`, `roles`.
    """

    name: ClassVar[str] = "schedule"
    needs: ClassVar[tuple[type, ...]] = (Split,)
    makes: ClassVar[type] = Schedule

    def run(self, module: Module) -> Module:
        """Order the calls; see the module's docstring."""
        graph, job = module.graph, module.job
        calls = model_calls(graph)
        check_calls(graph, calls, job.trained)
        check_turns(graph, calls, job.workload.turn_count)
        if job.schedule == "streamed" and all("type" in n.meta for n in graph.nodes if n.op != "output"):
            check_streamed(graph, updated_roles(calls))  # a graph read from a plan has no types, and was checked before
        rounds, awaited = rounds_of(graph, job), job.workload.rollout.kind == "full"
        grouped, most = frozenset(r for r in job.trained if job.with_group(r)), rounds.most if rounds else 1
        check_with_group(graph, calls, grouped)
        windows = windows_of(calls, in_order(graph, calls), job.schedule, most, awaited, grouped)
        late, hosts = g.response_dependent(graph), g.find(graph, ops.host)
        early = frozenset(n.name for n in hosts if n not in late)
        seen = tuple(str(g.node_named(graph, c.node).args[1]) for c in calls if c.op == "generate" and c.turn > 1)
        return module.put(
            Schedule(
                kind=job.schedule,
                windows=tuple(windows),
                calls=tuple(calls),
                hosts=tuple(n.name for n in hosts),
                phases=phases_of(graph, windows, early | frozenset(seen)),
                inputs=inputs_of(graph, calls),
                early=early,
                observations=seen,
                rounds=rounds,
            )
        )
