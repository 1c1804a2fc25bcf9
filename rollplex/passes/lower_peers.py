"""The programs beside the trainer's: the rollout rank decodes, the controller brings data in and runs host functions.

rollout      wait prompts | map rollout.kv | run generate | signal rollout | barrier .. | unmap ..
controller   run load | signal prompts | wait rollout | barrier .. | run host reward | signal score ..
streamed     run generate 0 | signal rollout[0] | run generate 1 ..   wait rollout[0] | run host reward 0 | ..
turns        .. | signal rollout | run host environment | signal history | wait history | run generate | ..
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollplex.ir.lora import lora_of
from rollplex.ir.steps import Barrier, Run, Signal, Step, Wait
from rollplex.passes.calls import Call
from rollplex.passes.inventory import CARRIED
from rollplex.passes.lowering import PUBLISHED, RELEASED, ROLLOUT_COMPLETE, THETA_QUIET, WAKE, Context
from rollplex.passes.state import Lifetimes
from rollplex.passes.trajectories import KEPT


@dataclass(frozen=True)
class RolloutProgram(Context):
    """Makes the steps of a rollout rank."""

    def steps(self) -> Iterator[Step]:
        """The rollout-rank program."""
        end = self.last_window["P1"]
        for call in self.schedule.generates:
            yield from self._turn(call)
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        if released := self.released(end):
            yield from released
            yield Signal(window=end, event=RELEASED)
        yield Barrier(window=self.last_window["P2"], name=THETA_QUIET)
        if self.calls_rollout:
            yield Wait(window=self.updating, event=WAKE)
            yield from self.woken
        yield from self.refresh("rollout", self.last_window["P3"])
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    def _turn(self, call: Call) -> Iterator[Step]:
        """Wait for prompts or observations, and sample: a later turn goes on from the KV of those before."""
        windows, inputs = self.schedule.turn_windows(call.turn), self.schedule.inputs[call.node]
        first = windows[0]
        yield from (Wait(window=first, event=name) for name in inputs)
        if call.turn == 1:
            yield from self.enter("rollout", first)
        tower = "rollout.vision" if "rollout.vision" in self.module[Lifetimes] else f"{self.policy}.vision"
        frozen = lora_of(self.module.job) is not None
        weights = (f"{self.policy}.{'base' if frozen else 'snapshot'}", f"{self.policy}.case3", tower)
        if self.second_copy:
            weights = ("rollout.weights", "rollout.vision")
        weights = (*weights, "rollout.adapters")
        held = self.placed(first, "hbm", *KEPT) if call.turn > 1 else ()
        for m in self.streamed_groups or (0,):
            at, (made,) = first if m == 0 else windows[-1], self.of_group((call.node,), m)
            yield Run(
                window=at, task="generate", node=call.node, role=call.role, microbatch=m,
                reads=(*self.placed(first, "hbm", *weights), *held),
                writes=self.placed(first, "hbm", "rollout.kv", "rollout.runtime"),
                streams=self.placed(first, "host", CARRIED),
                inputs=inputs, outputs=(made,),
            )  # fmt: skip
            yield Signal(window=windows[-1], event=made, carries=(made,))


@dataclass(frozen=True)
class ControllerProgram(Context):
    """Makes the controller's steps."""

    def steps(self) -> Iterator[Step]:
        """The controller's program: data in, host functions, barriers."""
        first, end = self.first, self.last_window["P1"]
        yield Run(window=first, task="load", node=self.prompts, outputs=(self.prompts,))
        yield Signal(window=first, event=self.prompts, carries=(self.prompts,))
        yield from self._hosts(first, self.schedule.early)
        done = (*self.schedule.early, *self.schedule.observations)
        late, last = [h for h in self.schedule.hosts if h not in done], max(len(self.streamed_groups) - 1, 0)
        for call in self.schedule.generates:
            at = self.schedule.turn_windows(call.turn)[-1]
            for m in self.streamed_groups or (0,):
                yield Wait(window=at, event=self.of_group((call.node,), m)[0])
                yield from self._hosts(at, late if m < last else (), m)
            yield from self._hosts(at, self.schedule.observations[call.turn - 1 : call.turn])
        yield Barrier(window=end, name=ROLLOUT_COMPLETE)
        yield from self._hosts(self.last_window["P2"], late, last)
        yield Barrier(window=self.last_window["P2"], name=THETA_QUIET)
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    def _hosts(self, window: str, which: Collection[str], group: int = 0) -> Iterator[Step]:
        """Host functions: those that no response is needed for at once, environments between turns, the rest behind.

        Under `streamed` the rest is called for a group as soon as it is complete.
        """
        for host in (h for h in self.schedule.hosts if h in which):
            (made,), inputs = self.of_group((host,), group), self.of_group(self.schedule.inputs[host], group)
            yield Run(window=window, task="host", node=host, microbatch=group, inputs=inputs, outputs=(made,))
            yield Signal(window=window, event=made, carries=(made,))
