"""The GPU table: vendor figures, logged capacities, and what stands in for a log that nobody has."""

from __future__ import annotations

import pytest

from rollplex.ir.errors import JobError
from rollplex.ir.hardware import GPUS, load_gpu

# name: (GB, TB/s, dense bf16 TFLOP/s, NVLink GB/s, PCIe GB/s, SMs)
VENDOR = {
    "A100-80": (80, 2.039, 312, 600, 64, 108),
    "H100": (80, 3.35, 989, 900, 128, 132),
    "H800": (80, 3.35, 989, 400, 128, 132),
    "H200": (141, 4.8, 989, 900, 128, 132),
    "H20": (96, 4.0, 148, 900, 128, 78),
}
LOGGED_GIB = {"H100": 79.1, "H800": 79.1, "H200": 139.8, "A800-80": 79.3, "A100-40": 39.4}


@pytest.mark.parametrize("name", VENDOR)
def test_figures_are_the_vendors(name: str) -> None:
    gpu = load_gpu(name)
    figures = (gpu.hbm_gb, gpu.bandwidth_tb_s, gpu.tflops_bf16, gpu.nvlink_gb_s, gpu.pcie_gb_s, gpu.sms)
    assert figures == VENDOR[name]


def test_b200_is_there_without_a_vendor_host_link() -> None:
    gpu = load_gpu("B200")
    assert (gpu.hbm_gb, gpu.bandwidth_tb_s, gpu.tflops_bf16, gpu.nvlink_gb_s, gpu.sms) == (180, 8.0, 2250, 1800, 148)
    assert "not in the vendor table" in gpu.note


@pytest.mark.parametrize("name", LOGGED_GIB)
def test_usable_memory_is_what_logs_show(name: str) -> None:
    gpu = load_gpu(name)
    assert gpu.usable_bytes == round(LOGGED_GIB[name] * 2**30)
    assert gpu.usable_source == "read in a log"


def test_without_a_log_the_capacity_is_an_estimate_that_says_so() -> None:
    gpu = load_gpu("H20")
    assert gpu.usable_gib == pytest.approx(96 * 0.985)
    assert gpu.usable_source.startswith("estimated, 0.985 x 96")


def test_no_gpu_claims_more_than_its_data_sheet() -> None:
    for gpu in GPUS:
        assert gpu.usable_gib <= gpu.hbm_gb
        assert gpu.page_bytes == (4096 if gpu.name == "cpu" else 2 * 2**20)


def test_the_h200_host_link_is_the_measured_one() -> None:
    assert load_gpu("H200").host_link_gb_s == pytest.approx(50.5, rel=0.01)


def test_names_ignore_case_and_near_misses_are_suggested() -> None:
    assert load_gpu("h800").name == "H800"
    with pytest.raises(JobError, match=r"no GPU `H801`\n    try: .*H800"):
        load_gpu("H801")
    with pytest.raises(JobError, match=r"try: one of A100-40, .*B200, cpu"):
        load_gpu("xyz")
