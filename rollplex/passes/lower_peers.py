"""The programs beside the trainer's: the rollout rank decodes, the controller brings data in and runs host functions.

rollout      wait prompts | map rollout.kv | run generate | signal rollout | barrier .. | unmap ..
controller   run load | signal prompts | wait rollout | barrier .. | run host reward | signal score ..
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.ir.lora import lora_of
from rollplex.ir.steps import Barrier, Run, Signal, Step, Wait
from rollplex.passes.inventory import CARRIED
from rollplex.passes.lowering import PUBLISHED, RELEASED, ROLLOUT_COMPLETE, THETA_QUIET, WAKE, Context
from rollplex.passes.state import Lifetimes


@dataclass(frozen=True)
class RolloutProgram(Context):
    """Makes the steps of a rollout rank."""

    def steps(self) -> Iterator[Step]:
        """The rollout-rank program."""
        first, end, call = self.schedule.decode_windows[0], self.last_window["P1"], self.schedule.generate
        inputs = self.schedule.inputs[call.node]
        yield from (Wait(window=first, event=name) for name in inputs)
        yield from self.enter("rollout", first)
        tower = "rollout.vision" if "rollout.vision" in self.module[Lifetimes] else f"{self.policy}.vision"
        frozen = lora_of(self.module.job) is not None
        weights = (f"{self.policy}.{'base' if frozen else 'snapshot'}", f"{self.policy}.case3", tower)
        if self.second_copy:
            weights = ("rollout.weights", "rollout.vision")
        weights = (*weights, "rollout.adapters")
        yield Run(
            window=first, task="generate", node=call.node, role=call.role, reads=self.placed(first, "hbm", *weights),
            writes=self.placed(first, "hbm", "rollout.kv", "rollout.runtime"),
            streams=self.placed(first, "host", CARRIED),
            inputs=inputs, outputs=(call.node,),
        )  # fmt: skip
        yield Signal(window=end, event=call.node, carries=(call.node,))
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        if released := self.released(end):
            yield from released
            yield Signal(window=end, event=RELEASED)
        yield Barrier(window=self.last_window["P2"], name=THETA_QUIET)
        if woken := self.woken:
            yield Wait(window=self.updating, event=WAKE)
            yield from woken
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
        yield from self._hosts(first, early=True)
        yield Wait(window=end, event=self.schedule.generate.node)
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        yield from self._hosts(self.last_window["P2"], early=False)
        yield Barrier(window=self.last_window["P2"], name=THETA_QUIET)
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    def _hosts(self, window: str, early: bool) -> Iterator[Step]:
        """Host functions: those that no response is needed for while the rollout engine decodes, the others behind."""
        for host in (h for h in self.schedule.hosts if (h in self.schedule.early) is early):
            yield Run(window=window, task="host", node=host, inputs=self.schedule.inputs[host], outputs=(host,))
            yield Signal(window=window, event=host, carries=(host,))
