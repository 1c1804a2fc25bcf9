"""The programs beside the trainer's: the rollout rank decodes, the controller brings data in and runs host functions.

rollout      wait prompts | map rollout.kv | run generate | signal rollout | barrier .. | unmap ..
controller   run load | signal prompts | wait rollout | barrier .. | run host reward | signal score ..
streamed     run generate 0 | signal rollout[0] | run generate 1 ..   wait rollout[0] | run host reward 0 | ..
turns        .. | signal rollout | run host environment | signal history | wait history | run generate | ..
rounds       run load 0 | signal prompts@0 | wait rollout@0 | run host reward 0 -> score@0 | run load 1 <- score@0 | ..
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from rollplex.ir.lora import lora_of
from rollplex.ir.steps import Barrier, Run, Signal, Step, Wait
from rollplex.passes.calls import Call
from rollplex.passes.inventory import CARRIED
from rollplex.passes.lower_release import ReleasedSnapshot
from rollplex.passes.lowering import PUBLISHED, RELEASED, ROLLOUT_COMPLETE, THETA_QUIET, WAKE, Context
from rollplex.passes.state import Lifetimes
from rollplex.passes.trajectories import KEPT


@dataclass(frozen=True)
class RolloutProgram(ReleasedSnapshot):
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
        yield from self.bound_again()
        if self.calls_rollout:
            yield Wait(window=self.updating, event=WAKE)
            yield from self.woken
        yield from self.refresh("rollout", self.last_window["P3"])
        yield Barrier(window=self.last_window["P3"], name=PUBLISHED)

    def _turn(self, call: Call) -> Iterator[Step]:
        """Wait for prompts or observations, and sample: a later turn goes on from the KV of those before."""
        windows, inputs = self.schedule.turn_windows(call.turn), self.schedule.inputs[call.node]
        first = windows[0]
        rounds = self.schedule.rounds.before if self.schedule.rounds else range(0)
        for r in (*rounds, len(rounds)):
            at, ends = (first, first) if r in rounds else (windows[min(len(rounds), 1)], windows[-1])
            yield from (Wait(window=at, event=name) for name in self.in_round(inputs, r))
            if call.turn == 1 and r == 0:
                yield from self.enter("rollout", first)
            yield from self._sampled(call, r, at, ends)

    def _sampled(self, call: Call, number: int, begins: str, ends: str) -> Iterator[Step]:
        """The responses of a round, all together or as each group is complete."""
        first = self.schedule.turn_windows(call.turn)[0]
        inputs = self.in_round(self.schedule.inputs[call.node], number)
        tower = "rollout.vision" if "rollout.vision" in self.module[Lifetimes] else f"{self.policy}.vision"
        frozen = lora_of(self.module.job) is not None
        weights = (f"{self.policy}.{'base' if frozen else 'snapshot'}", f"{self.policy}.case3", tower)
        if self.second_copy:
            weights = ("rollout.weights", "rollout.vision")
        weights = (*weights, "rollout.adapters")
        held = self.placed(first, "hbm", *KEPT) if call.turn > 1 else ()
        for m in self.streamed_groups or (0,):
            at, (made,) = begins if m == 0 else ends, self.in_round(self.of_group((call.node,), m), number)
            yield Run(
                window=at, task="generate", node=call.node, role=call.role, microbatch=number or m,
                reads=(*self.placed(first, "hbm", *weights), *held),
                writes=self.placed(first, "hbm", "rollout.kv", "rollout.runtime"),
                streams=self.placed(first, "host", CARRIED),
                inputs=inputs, outputs=(made,),
            )  # fmt: skip
            yield Signal(window=ends, event=made, carries=(made,))


@dataclass(frozen=True)
class ControllerProgram(Context):
    """Makes the controller's steps."""

    def steps(self) -> Iterator[Step]:
        """The controller's program: data in, host functions, barriers."""
        first, end = self.first, self.last_window["P1"]
        yield from self._rounds(first)
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

    def _rounds(self, window: str) -> Iterator[Step]:
        """Prompts of the step; where groups are sampled again, what earlier rounds found decides on the next one's."""
        rounds, (call, *_) = self.schedule.rounds, self.schedule.generates
        for r in range(rounds.most if rounds else 1):
            made = self.in_round((self.prompts,), r)
            found = self.in_round(rounds.made_of, r - 1) if rounds and r else ()
            yield Run(window=window, task="load", node=self.prompts, microbatch=r, inputs=found, outputs=made)
            yield Signal(window=window, event=made[0], carries=made)
            if rounds and r in rounds.before:
                yield Wait(window=window, event=self.in_round((call.node,), r)[0])
                yield from self._judge(window, r)

    def _judge(self, window: str, number: int) -> Iterator[Step]:
        """The host functions that say which groups of a round are kept; nobody but the controller asks."""
        assert self.schedule.rounds is not None
        for host in (h for h in self.schedule.hosts if h in self.schedule.rounds.made_of):
            inputs, made = (self.in_round(names, number) for names in (self.schedule.inputs[host], (host,)))
            yield Run(window=window, task="host", node=host, microbatch=number, inputs=inputs, outputs=made)

    def _hosts(self, window: str, which: Collection[str], group: int = 0) -> Iterator[Step]:
        """Host functions: those that no response is needed for at once, environments between turns, the rest behind.

        Under `streamed` the rest is called for a group as soon as it is complete.
        """
        rounds = self.schedule.rounds
        for host in (h for h in self.schedule.hosts if h in which):
            number = rounds.last if rounds and host in rounds.made_of else group
            (made,), inputs = self.of_group((host,), group), self.of_group(self.schedule.inputs[host], group)
            yield Run(window=window, task="host", node=host, microbatch=number, inputs=inputs, outputs=(made,))
            yield Signal(window=window, event=made, carries=(made,))
