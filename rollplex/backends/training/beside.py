"""Prefix work beside decode, as the plan's policy has it: each prompt's kernels on the SMs of the row that holds now.

row  at most 128 decode: wait     at most 40, or from token 900: 80 SMs     nothing decodes: all SMs, no partition

Who runs the task asks whether it may begin, and waits where it may not: nothing waits in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from rollplex.backends.device import Device
from rollplex.backends.live import Live, LiveBatch
from rollplex.ir.job import Job
from rollplex.ir.planned_sharing import Policy

WAIT = 0


class Row(NamedTuple):
    """From when on prefixes run so: what of a `PolicyRow` is followed."""

    live_at_most: int
    from_tokens: int
    sms: int

    def holds(self, live: Live) -> bool:
        """Whether so few responses decode, or those that do are so old: whichever comes first."""
        return live.responses <= self.live_at_most or live.tokens >= self.from_tokens


class Beside:
    """The policy of one training rank; its partitions are made at the start, when there is room for sure.

    `live` are the words of all GPUs of its copy of the model, whose ranks run a prefix together: it is by the row of
    the GPU that is least far, as each is slowed down until its own decode ends. One that has ended has no say.
    """

    def __init__(self, policy: Policy, job: Job, live: Sequence[LiveBatch], device: Device) -> None:
        rows = policy.rows if policy.kind == "solved" else ()
        self._rows = [Row(row.live_at_most, row.from_tokens, row.sms) for row in rows]
        measured = job.cluster.calibration
        surface = measured.surface if measured else None
        self._every = surface.all_sms if surface else job.device.sms
        if policy.kind == "fixed":
            self._rows = [Row(1, 0, max(1, round((policy.share or 1.0) * self._every)))]
        self._live = live
        self._given = self._every
        wanted = {row.sms for row in self._rows} - {WAIT, self._every}
        self._partitions: dict[int, Callable[[], AbstractContextManager[None]]] = {
            sms: device.partition(sms) for sms in sorted(wanted)
        }

    def may_begin(self) -> bool:
        """Look at what decodes: whether the policy lets a prefix begin now, on the SMs of the row that holds."""
        self._given = self._sms([word.read() for word in self._live])
        return self._given != WAIT

    @contextmanager
    def prompt(self) -> Iterator[None]:
        """Around the work of one prefix, on the SMs that it was given when it might begin."""
        with self._partitions.get(self._given, nullcontext)():
            yield

    def close(self) -> None:
        """No prefix any more."""
        for word in self._live:
            word.close()

    def _sms(self, gpus: Sequence[Live]) -> int:
        """By the row that holds on all GPUs on which something decodes."""
        decoding = [live for live in gpus if live.responses]
        if not decoding or not self._rows:
            return self._every
        return self._rows[min(map(self._row, decoding))].sms

    def _row(self, live: Live) -> int:
        """The last row that holds; more responses than any row has are the first row's."""
        return max((i for i, row in enumerate(self._rows) if row.holds(live)), default=0)
