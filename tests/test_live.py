"""The runtime follows how many responses decode: one word of shared memory, a row of the plan, a part of the SMs.

rollout  FULL ........ 9 ....... 3 ........ 0          rows  at most 16: wait   8: 64 SMs   4: all 132, no partition
prefix   waits         waits     no partition, all SMs
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import torch
from mutants.plans import SOLVED

from rollplex.backends.device import Device
from rollplex.backends.live import FULL, LiveBatch
from rollplex.backends.memory.host import HostDevice
from rollplex.backends.training.beside import Beside
from rollplex.ir.errors import EngineError
from rollplex.ir.job import Job, load_job
from rollplex.ir.planned_sharing import Policy, PolicyRow


@dataclass
class Parts:
    """A device that says which part of it work runs on."""

    on: list[int] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    def partition(self, sms: int) -> Callable[[], AbstractContextManager[None]]:
        self.made.append(sms)

        @contextmanager
        def part() -> Iterator[None]:
            self.on.append(sms)
            yield

        return part


def table(*rows: tuple[int, int]) -> Policy:
    made = (
        PolicyRow(live_at_most=n, chunk_tokens=6000 if sms else 0, sms=sms, alone_s=1, decode_s=1, hidden_s=0)
        for n, sms in rows
    )
    return Policy(kind="solved", rows=tuple(made))


def beside(policy: Policy, tmp_path: Path, parts: Parts) -> tuple[Beside, LiveBatch]:
    path = tmp_path / "job.yaml"
    path.write_text(SOLVED)
    job: Job = load_job(path)
    here = Beside(policy, job, [LiveBatch(tmp_path, gpu) for gpu in (0, 1)], cast(Device, parts))
    return here, LiveBatch(tmp_path, 0)


def run_on(here: Beside, parts: Parts) -> int:
    """The SMs that a prompt ran on; 0: no partition."""
    parts.on.clear()
    with here.prompt():
        pass
    return parts.on[0] if parts.on else 0


def test_a_word_is_seen_by_whoever_opens_it(tmp_path: Path) -> None:
    """Also when the directory is gone, and each GPU has its own."""
    ours, theirs, other = LiveBatch(tmp_path, 3), LiveBatch(tmp_path, 3), LiveBatch(tmp_path, 4)
    for file in tmp_path.iterdir():
        file.unlink()
    ours.tell(97)
    assert (theirs.read(), other.read()) == (97, 0)
    ours.tell(FULL)
    assert theirs.read() == FULL
    ours.close()
    assert theirs.read() == FULL


def test_a_prompt_runs_by_the_row_of_what_decodes(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((128, 32), (40, 64), (9, 96), (4, 132)), tmp_path, parts)
    assert parts.made == [32, 64, 96]
    found = {}
    for decoding in (FULL, 129, 128, 41, 40, 10, 9, 5, 4, 1, 0):
        live.tell(decoding)
        found[decoding] = run_on(here, parts)
    assert found == {FULL: 32, 129: 32, 128: 32, 41: 32, 40: 64, 10: 64, 9: 96, 5: 96, 4: 0, 1: 0, 0: 0}


def test_ranks_of_one_model_go_by_the_fullest_of_their_gpus(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((128, 32), (40, 64)), tmp_path, parts)
    live.tell(3)
    LiveBatch(tmp_path, 1).tell(99)
    assert run_on(here, parts) == 32


def test_a_prompt_waits_until_fewer_decode(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((16, 0), (8, 64)), tmp_path, parts)
    live.tell(FULL)
    began = threading.Event()

    def prefix() -> None:
        with here.prompt():
            began.set()

    thread = threading.Thread(target=prefix)
    thread.start()
    live.tell(9)
    time.sleep(0.05)
    assert not began.is_set()
    live.tell(8)
    assert began.wait(5)
    thread.join()
    assert parts.on == [64]


def test_a_prompt_that_waits_runs_when_decode_has_ended(tmp_path: Path) -> None:
    parts = Parts()
    here, live = beside(table((16, 0)), tmp_path, parts)
    live.tell(0)
    assert (run_on(here, parts), parts.made) == (0, [])


def test_a_fixed_share_is_lifted_behind_decode(tmp_path: Path) -> None:
    """60 % of 132 SMs while anything decodes, all of them then."""
    parts = Parts()
    here, live = beside(Policy(kind="fixed", share=0.6), tmp_path, parts)
    live.tell(FULL)
    assert run_on(here, parts) == 79
    live.tell(1)
    assert run_on(here, parts) == 79
    live.tell(0)
    assert run_on(here, parts) == 0


@pytest.mark.parametrize("kind", ["mps", "none"])
def test_mps_default_partitions_nothing(kind: str, tmp_path: Path) -> None:
    """Also where a surface gave its prediction rows."""
    parts = Parts()
    rows = table((128, 132)).rows if kind == "mps" else ()
    here, live = beside(Policy.model_validate({"kind": kind, "rows": rows}), tmp_path, parts)
    live.tell(FULL)
    assert (run_on(here, parts), parts.made) == (0, [])


def test_a_host_holds_nothing_to_a_part_of_its_cores() -> None:
    with HostDevice().partition(1)():
        assert torch.ones(1).item() == 1


def test_a_torch_without_green_contexts_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from rollplex.backends.cuda.partition import Partition

    monkeypatch.setitem(sys.modules, "torch.cuda.green_contexts", None)
    with pytest.raises(EngineError, match="64 SMs of GPU 0 cannot be split off: this torch has no green contexts"):
        Partition(0, 64)
