"""Which GPUs a run would see and what is refused before it starts; nothing here needs one."""

from __future__ import annotations

import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import pytest
from megatron_tiny import megatron_plan
from two_gpus import gpu_job, two_gpu_job

from rollplex.backends import collectives
from rollplex.backends.collectives import own_gpus
from rollplex.backends.cuda import machine, reach
from rollplex.backends.cuda.machine import Card, cards, visible
from rollplex.ir.errors import EngineError, RunError
from rollplex.ir.placement import cuda_device
from rollplex.runtime import preflight
from rollplex.runtime.preflight import check_engines, check_gpus

LISTED = """0, GPU-aa11, NVIDIA H200, 143000
1, GPU-bb22, NVIDIA H200, 1000
2, GPU-cc33, NVIDIA H100, 80000
"""
GIB = 1 << 30
subprocess_run = subprocess.run


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, "012"),
        ("", ""),
        ("2,0", "20"),
        ("GPU-bb,0", "10"),
        ("1,7,0", "1"),  # CUDA itself stops at a name that it does not know
    ],
)
def test_cuda_numbers_cards_as_it_is_told(asked: str | None, found: str) -> None:
    assert "".join(card.index for card in visible(LISTED, asked)) == found


def test_a_card_has_its_free_bytes() -> None:
    assert visible(LISTED, "1") == (Card("1", "GPU-bb22", "NVIDIA H200", 1000 << 20),)


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(RunError, match="the run uses CUDA device 3, this machine has 3 GPUs"):
        check_gpus([0, 3], GIB, visible(LISTED, None))


def test_a_device_that_is_taken_is_refused() -> None:
    with pytest.raises(RunError, match=r"needs 2\.0 GiB on device 1 \(NVIDIA H200\), 1000\.0 MiB are free"):
        check_gpus([0, 1], 2 * GIB, visible(LISTED, None))


def test_ranks_that_share_a_device_share_its_memory() -> None:
    check_gpus([0, 0], 69 * GIB, visible(LISTED, None))
    with pytest.raises(RunError, match=r"needs 140\.0 GiB on device 0"):
        check_gpus([0, 0], 70 * GIB, visible(LISTED, None))


def test_ranks_are_on_the_devices_that_the_job_names() -> None:
    assert [cuda_device(two_gpu_job(), gpu) for gpu in range(2)] == [0, 1]
    assert [cuda_device(two_gpu_job(1, devices=(3, 1)), gpu) for gpu in range(2)] == [3, 1]


def test_nccl_takes_ranks_that_have_a_gpu_each() -> None:
    assert [own_gpus(two_gpu_job(1, devices=devices), 2) for devices in ((), (1, 0), (0, 0))] == [True, True, False]


@pytest.mark.parametrize(
    ("train", "rollout", "gpus", "kind", "whole", "made"),
    [
        (2, 1, 2, "train", [True], []),
        (2, 1, 4, "train", [False], [[0, 1], [2, 3], [0, 2], [1, 3]]),
        (1, 1, 2, "train", [True], []),
        (2, 2, 2, "rollout", [True], []),
        (2, 2, 4, "rollout", [False], [[0, 1], [2, 3]]),
        (2, 1, 4, "rollout", [], []),
    ],
    ids=str,
)
def test_nccl_connects_those_that_send_to_each_other(
    train: int, rollout: int, gpus: int, kind: str, whole: list[bool], made: list[list[int]],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """All ranks at once only where they are a group: a communicator takes hundreds of MiB, which no plan counts."""
    job, begun, groups = gpu_job(train, rollout, gpus), list[bool](), list[list[int]]()
    monkeypatch.setattr(collectives.torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(collectives.Groups, "_begin", lambda self, gpu: None)
    monkeypatch.setattr(collectives.dist, "init_process_group", lambda **options: begun.append("device_id" in options))
    monkeypatch.setattr(collectives.dist, "new_group", lambda ranks, timeout: groups.append(ranks) or "group")
    collectives.Groups.join(job, kind, 0, gpus, tmp_path)
    assert (begun, groups) == (whole, made)


def test_ranks_of_one_vllm_engine_do_not_share_a_gpu() -> None:
    check_engines(two_gpu_job(2, devices=(0, 1)))
    check_engines(two_gpu_job(1, devices=(0, 0)))  # engines of one rank each
    check_engines(two_gpu_job(2, engine="host", devices=(0, 0)))
    with pytest.raises(RunError, match="the 2 ranks of vLLM's engine 0 are on CUDA devices 0, 0: each needs its own"):
        check_engines(two_gpu_job(2, devices=(0, 0)))


def test_no_driver_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*args: Any, **kwargs: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory", "nvidia-smi")

    monkeypatch.setattr(machine.subprocess, "run", gone)
    with pytest.raises(RunError, match="nvidia-smi does not answer"):
        cards()


def test_a_driver_that_fails_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"
    done = subprocess.CompletedProcess([], 9, "", said)
    monkeypatch.setattr(machine.subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(RunError, match="couldn't communicate with the NVIDIA driver"):
        cards()


# ---- whose memory a GPU reaches


class Reaching:
    """A driver of three GPUs of which only 0 and 1 reach each other; `broken` is a call that it fails."""

    class CUresult:
        CUDA_ERROR_OUT_OF_MEMORY = 2

    def __init__(self, broken: str = "") -> None:
        self.broken = broken

    def _said(self, name: str, *values: int) -> tuple[Any, ...]:
        return (CUresult.NO_DEVICE if name == self.broken else CUresult.SUCCESS, *values)

    def cuInit(self, flags: int) -> tuple[Any, ...]:
        return self._said("cuInit")

    def cuDeviceGet(self, number: int) -> tuple[Any, ...]:
        return self._said("cuDeviceGet", 70 + number)

    def cuDeviceCanAccessPeer(self, first: int, second: int) -> tuple[Any, ...]:
        return self._said("cuDeviceCanAccessPeer", int({first, second} == {70, 71}))

    def cuGetErrorString(self, status: Any) -> tuple[int, bytes]:
        return 0, b"no CUDA-capable device is detected"


class CUresult(IntEnum):
    SUCCESS = 0
    NO_DEVICE = 100


def test_the_driver_is_asked_for_every_pair_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach.cuda, "bindings", Reaching)
    assert list(reach.cannot([0, 1])) == []
    assert list(reach.cannot([2, 0, 1])) == [(2, 0), (2, 1), (0, 2), (1, 2)]
    monkeypatch.setattr(reach.cuda, "bindings", lambda: Reaching("cuInit"))
    with pytest.raises(EngineError, match=r"the driver's start: no CUDA-capable device is detected \(NO_DEVICE\)"):
        list(reach.cannot([0, 1]))


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("import sys; sys.exit('CUDA driver: no device')", "reach each other's memory: CUDA driver: no device"),
        ("import time; time.sleep(60)", r"has not said for 0\.5 s which GPUs reach each other's memory"),
        ("print([[0, 2]])", ""),
    ],
)
def test_it_is_asked_in_a_process_of_its_own(said: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines are started later by who asks: no driver is begun there. What goes wrong is told, not a traceback."""
    asked: list[list[str]] = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess_run([sys.executable, "-c", said], **options)

    monkeypatch.setattr(reach.subprocess, "run", run)
    monkeypatch.setattr(reach, "ANSWER_S", 0.5 if "sleep" in said else 60.0)
    if told:
        with pytest.raises(RunError, match=told):
            reach.unreached([0, 2])
    else:
        assert reach.unreached([0, 2]) == [(0, 2)]
    assert asked == [[sys.executable, "-m", "rollplex.backends.cuda.reach", "0", "2"]]


def test_without_a_driver_the_process_says_so_in_a_line() -> None:
    with pytest.raises(RunError, match=r"which GPUs reach each other's memory: .*\n    try: see `rollplex doctor`"):
        reach.unreached([0, 1])


def test_ranks_that_do_not_reach_their_peers_are_refused() -> None:
    """Only those that write to each other, each on a GPU of its own, and only where the plan has them do it."""
    plan, seen = megatron_plan(2), list[Any]()

    def ask(devices: Any) -> list[tuple[int, int]]:
        seen.append(devices)
        return [(0, 7), (0, 1), (1, 0)]

    preflight.check_reach(plan, two_gpu_job(), lambda devices: [(0, 7)])
    told = "do not reach: CUDA device 0 into 1, 1 into 0\n    try: set run.devices"
    with pytest.raises(RunError, match=f"2 training ranks have one rollout rank .*{told}"):
        preflight.check_reach(plan, two_gpu_job(), ask)
    assert seen == [[0, 1]]
    preflight.check_reach(plan, two_gpu_job(devices=(1, 1)), ask)
    preflight.check_reach(megatron_plan(1), two_gpu_job(), ask)
    assert seen == [[0, 1]]
