"""Cut an iteration into windows: which engine runs what between two barriers (paper section 3.1, figure 1).

    rollplex   P1 prefix-reference | P1 prefix-actor | P1 decode    ||  P2 score-reference | P2 train-actor  ||  P3 ..
               (the rollout engine decodes through all three)
    serial     P1 decode  ||  P2 prefix-reference | P2 score-reference | P2 prefix-actor | P2 train-actor    ||  P3 ..
    naive      as rollplex, with everything resident all the time
    disaggregated   as serial, with rollout on GPUs of its own: they wait in P2, the training GPUs in P1 (section 4.2)

`||` are the barriers rollout-complete and theta-quiet; `published` ends the iteration. A window is the unit of
lifetime analysis; the trainer runs one window after the other, the rollout engine runs through those of phase P1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import networkx as nx
import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError
from rollplex.ir.module import Module
from rollplex.passes.prefix_split import Split

OVERLAPPED = ("rollplex", "naive")
"""Schedules whose prefixes run beside the decode of the same GPUs."""
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
class Call:
    """A model call of the split graph."""

    node: str
    role: str
    op: str
    trained: bool
    boundary: str = ""


@dataclass(frozen=True)
class Schedule:
    """Windows in the trainer's order, the calls behind them, and the host functions between."""

    made_by: ClassVar[str] = "schedule"
    kind: str
    windows: tuple[Window, ...]
    calls: tuple[Call, ...]
    hosts: tuple[str, ...]
    phases: dict[str, str]

    @property
    def overlapped(self) -> bool:
        """Whether prefixes run beside decode."""
        return self.kind in OVERLAPPED

    def names(self, *kinds: Kind, phase: str = "") -> tuple[str, ...]:
        """Names of the windows of these kinds (all kinds if none is given) and phase, in order."""
        found = (w for w in self.windows if (not kinds or w.kind in kinds) and phase in ("", w.phase))
        return tuple(w.name for w in found)

    @property
    def decode_windows(self) -> tuple[str, ...]:
        """Windows during which the rollout engine may be decoding."""
        return self.names(phase="P1")

    @property
    def generate(self) -> Call:
        """The call that samples responses."""
        return next(c for c in self.calls if c.op == "generate")

    def call(self, op: str, role: str) -> Call | None:
        """The role's call of this kind, if it has one."""
        return next((c for c in self.calls if c.op == op and c.role == role), None)

    def __str__(self) -> str:
        return "\n".join(f"{w.name:<24} {w.node}" for w in self.windows)


def model_calls(graph: fx.Graph) -> list[Call]:
    """Model calls of a split graph in an order that keeps its dependences (networkx; ties by the program's order)."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    dag = nx.DiGraph((i, n) for n in graph.nodes for i in n.all_input_nodes)
    dag.add_nodes_from(graph.nodes)
    nodes = nx.lexicographical_topological_sort(dag, key=order.__getitem__)
    updated = g.updates(graph)
    return [_call(n, set(updated)) for n in nodes if g.is_model_call(n) or n in updated.values()]


def _call(node: fx.Node, trained: set[str]) -> Call:
    op, role = g.op_name(node).removeprefix("rx."), g.role(node) or ""
    boundary = next((i.name for i in node.all_input_nodes if g.is_op(i, ops.prefix)), "")
    if op not in ("generate", "prefix", "suffix", "update"):
        raise GraphError(
            f"`{node.name}` stays whole: all or none of it depends on the response, and no schedule runs it yet",
            where=g.loc(node),
            hint="score responses of `generate` against prompts that do not depend on them",
        )
    return Call(node.name, role, op, role in trained, boundary)


def windows_of(calls: list[Call], kind: str) -> list[Window]:
    """The windows of a schedule; frozen roles come before trained ones, so that their weights leave early."""
    prefixes = sorted((c for c in calls if c.op == "prefix"), key=lambda c: c.trained)
    suffixes = sorted((c for c in calls if c.op == "suffix"), key=lambda c: c.trained)
    decode = Window("P1 decode", "P1", "decode", next(c.node for c in calls if c.op == "generate"), "")
    overlapped = kind in OVERLAPPED
    windows = [_prefix(c, "P1") for c in prefixes if overlapped]
    windows.append(decode)
    for call in suffixes:
        if not overlapped:
            windows += [_prefix(p, "P2") for p in prefixes if p.node == call.boundary]
        windows.append(_suffix(call))
    for call in (c for c in calls if c.op == "update"):
        windows.append(Window("P3 update", "P3", "update", call.node, call.role))
        windows.append(Window("P3 publish", "P3", "publish", call.node, call.role))
    return windows


def _prefix(call: Call, phase: Phase) -> Window:
    return Window(f"{phase} prefix-{call.role}", phase, "prefix", call.node, call.role)


def _suffix(call: Call) -> Window:
    kind: Kind = "train" if call.trained else "score"
    return Window(f"P2 {kind}-{call.role}", "P2", kind, call.node, call.role)


def phases_of(graph: fx.Graph, windows: list[Window]) -> dict[str, str]:
    """Phase of every node: of its window, else P2 (loss maths), with the update in P3 and the inputs in P1."""
    phases = {n.name: "P2" for n in graph.nodes}
    phases |= {n.name: "P1" for n in graph.nodes if n.op == "placeholder"}
    phases |= {w.node: w.phase for w in windows}
    return phases


def check_calls(graph: fx.Graph, calls: list[Call]) -> None:
    """One rollout, one trained role, one prefix and one suffix a role: what the runtime can order today."""
    by_name = {n.name: n for n in graph.nodes}
    for op in ("generate", "update"):
        found = [c for c in calls if c.op == op]
        if len(found) != 1:
            where = g.loc(by_name[found[1].node]) if found else ""
            raise GraphError(f"an iteration has exactly one `{op}`, this one has {len(found)}", where=where)
    seen: set[tuple[str, str]] = set()
    for call in calls:
        if (call.op, call.role) in seen:
            raise GraphError(
                f"`{call.role}` has a second `{call.op}` call",
                where=g.loc(by_name[call.node]),
                hint="score each role once a step",
            )
        seen.add((call.op, call.role))


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
        calls = model_calls(module.graph)
        check_calls(module.graph, calls)
        windows = windows_of(calls, module.job.schedule)
        hosts = tuple(n.name for n in g.find(module.graph, ops.host))
        phases = phases_of(module.graph, windows)
        return module.put(Schedule(module.job.schedule, tuple(windows), tuple(calls), hosts, phases))
