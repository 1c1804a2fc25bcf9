"""Which GPUs a run would see and what is refused before it starts; nothing here needs one."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from two_gpus import two_gpu_job

from rollplex.backends.collectives import own_gpus
from rollplex.backends.cuda import machine
from rollplex.backends.cuda.machine import Card, cards, visible
from rollplex.ir.errors import RunError
from rollplex.ir.placement import cuda_device
from rollplex.runtime.preflight import check_engines, check_gpus

LISTED = """0, GPU-aa11, NVIDIA H200, 143000
1, GPU-bb22, NVIDIA H200, 1000
2, GPU-cc33, NVIDIA H100, 80000
"""
GIB = 1 << 30


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
