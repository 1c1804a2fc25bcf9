"""Prefix work beside decode, as the plan's policy has it: each prompt's kernels on the SMs of the row that holds now.

row  at most 128 decode: wait     at most 40 decode: 80 SMs      nothing decodes any more: all SMs, no partition

Who runs the task asks whether it may begin, and waits where it may not: nothing waits in here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rollplex.backends.device import Device
from rollplex.backends.live import LiveBatch
from rollplex.ir.job import Job
from rollplex.ir.planned_sharing import Policy

WAIT = 0


class Beside:
    """The policy of one training rank; its partitions are made at the start, when there is room for sure.

    `live` are the words of all GPUs of its copy of the model, whose ranks run a prefix together: the fullest says when.
    """

    def __init__(self, policy: Policy, job: Job, live: Sequence[LiveBatch], device: Device) -> None:
        self._rows = [(row.live_at_most, row.sms) for row in policy.rows if policy.kind == "solved"]
        measured = job.cluster.calibration
        surface = measured.surface if measured else None
        self._every = surface.all_sms if surface else job.device.sms
        if policy.kind == "fixed":
            self._rows = [(1, max(1, round((policy.share or 1.0) * self._every)))]
        self._live = live
        self._given = self._every
        wanted = {sms for _, sms in self._rows} - {WAIT, self._every}
        self._partitions: dict[int, Callable[[], AbstractContextManager[None]]] = {
            sms: device.partition(sms) for sms in sorted(wanted)
        }

    def may_begin(self) -> bool:
        """Look at what decodes: whether the policy lets a prefix begin now, on the SMs of the row that holds."""
        self._given = self._sms(max(word.read() for word in self._live))
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

    def _sms(self, live: int) -> int:
        """By the last row that so many responses are not too many for; more than any row has is the first row's."""
        if not live or not self._rows:
            return self._every
        return next((sms for most, sms in reversed(self._rows) if live <= most), self._rows[0][1])
