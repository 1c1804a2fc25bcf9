"""The programs beside the trainer's: the rollout rank decodes, the controller brings data in and runs host functions.

rollout      wait prompts | map rollout.kv | run generate | signal rollout | barrier .. | unmap ..
controller   run load | signal prompts | wait rollout | barrier .. | run host reward | signal score ..
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch.fx as fx

from rollplex.ir import graph as g
from rollplex.ir.steps import Barrier, Run, Signal, Step, Wait
from rollplex.passes.lowering import PUBLISHED, RELEASED, ROLLOUT_COMPLETE, THETA_QUIET, Context


@dataclass(frozen=True)
class RolloutProgram(Context):
    """Makes the steps of a rollout rank."""

    def steps(self) -> Iterator[Step]:
        """The rollout-rank program."""
        first, end, call = self.schedule.decode_windows[0], self.last_window["P1"], self.schedule.generate
        yield Wait(window=first, event=self.prompts)
        yield from self.enter("rollout", first)
        weights = (f"{self.policy}.snapshot", f"{self.policy}.case3", f"{self.policy}.vision")
        if self.second_copy:
            weights = ("rollout.weights", "rollout.vision")
        yield Run(
            window=first, task="generate", node=call.node, role=call.role, reads=self.placed(first, "hbm", *weights),
            writes=self.placed(first, "hbm", "rollout.kv", "rollout.runtime"),
            inputs=(self.prompts,), outputs=(call.node,),
        )  # fmt: skip
        yield Signal(window=end, event=call.node, carries=(call.node,))
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        if released := self.released(end):
            yield from released
            yield Signal(window=end, event=RELEASED)
        yield Barrier(window=self.last_window["P2"], name=THETA_QUIET)
        yield from self.refresh("rollout", self.last_window["P3"])
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)


@dataclass(frozen=True)
class ControllerProgram(Context):
    """Makes the controller's steps."""

    def steps(self) -> Iterator[Step]:
        """The controller's program: data in, host functions, barriers."""
        first, end = self.first, self.last_window["P1"]
        yield Run(window=first, task="load", node=self.prompts, outputs=(self.prompts,))
        yield Signal(window=first, event=self.prompts, carries=(self.prompts,))
        yield Wait(window=end, event=self.schedule.generate.node)
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        at = self.last_window["P2"]
        for host in self.schedule.hosts:
            yield Run(window=at, task="host", node=host, inputs=self._host_inputs(host), outputs=(host,))
            yield Signal(window=at, event=host, carries=(host,))
        yield Barrier(window=at, name=THETA_QUIET)
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    def _host_inputs(self, host: str) -> tuple[str, ...]:
        """Values a host function's arguments are made of: prompts, the rollout, other host results."""
        sources = {self.prompts, self.schedule.generate.node, *self.schedule.hosts}
        found: list[str] = []

        def walk(node: fx.Node) -> None:
            for i in node.all_input_nodes:
                if i.name not in sources:
                    walk(i)
                elif i.name not in found:
                    found.append(i.name)

        walk(g.node_named(self.module.graph, host))
        return tuple(found)
