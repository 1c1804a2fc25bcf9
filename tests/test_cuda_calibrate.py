"""On GPUs: quick calibrations of a small model, whose file a job takes and a plan is solved by.

one GPU    decode beside prefixes
two        a trainer of TP 2, an engine on each; one engine of both, whose ranks sum within a captured graph
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from rollplex.backends.cuda.mps import CONTROL
from rollplex.ir.hardware import GPUS
from rollplex.ir.job import load_job
from rollplex.runtime.calibrate.command import calibrate

on_gpu = pytest.mark.skipif(
    not (torch.cuda.is_available() and shutil.which(CONTROL)), reason="needs an NVIDIA GPU and its MPS"
)
JOB = """\
model: Qwen2.5-VL-3B
cluster: {{gpu: {gpu}, gpus_per_node: 1, host_memory_gb: 64}}
roles:
  actor:
    train: {{engine: megatron}}
    rollout: {{engine: vllm, kv_cache_gib: 10}}
workload: {{prompts: 2, group: 4, prompt_tokens: 2000, response_tokens: 256}}
"""


def gpu_here() -> str:
    """The name in our table of the GPU at hand."""
    words = torch.cuda.get_device_name(0).replace("-", " ").split()
    return next((gpu.name for gpu in GPUS if gpu.name.split("-")[0] in words), "")


TWO = ("cluster.gpus_per_node=2", "roles.actor.train.tensor_parallel=2")
CUTS = {
    "an engine a GPU": TWO,
    "one engine": (*TWO, "roles.actor.rollout.tensor_parallel=2", "roles.actor.train.sequence_parallel=false"),
}


@on_gpu
def test_a_quick_calibration(tmp_path: Path) -> None:
    """Rates are below the GPU's data sheet, nothing is faster beside others, and the job may be solved by them."""
    if not (gpu := gpu_here()):
        pytest.skip(f"{torch.cuda.get_device_name(0)} is not in the table of GPUs")
    path, out, told = tmp_path / "job.yaml", tmp_path / "here.json", []
    path.write_text(JOB.format(gpu=gpu))
    job = load_job(path)
    found = calibrate(job, out, 60, True, lambda what, figure: told.append(f"{what}: {figure}"), lambda grid: None)
    print("\n".join(told))
    assert all(0 < rate.tflops < job.device.tflops_bf16 * 1.05 for rate in found.gemm)
    assert found.hbm_gb_s < job.device.bandwidth_tb_s * 1e3 * 1.05
    assert found.link.both_gb_s < job.device.pcie_gb_s / 2
    assert found.surface
    assert all(found.surface.beside(b, 2000, found.surface.all_sms).rate < 1.1 for b in found.surface.batches)
    assert load_job(path, ["cluster.calibration=here.json", "sharing.kind=solved"]).cluster.calibration == found


@on_gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize("name", CUTS)
def test_ranks_on_two_gpus_are_measured_together(name: str, tmp_path: Path) -> None:
    """A rank on every SM has less to compute than the whole model; what it exchanges is below NVLink's data sheet."""
    if not (gpu := gpu_here()):
        pytest.skip(f"{torch.cuda.get_device_name(0)} is not in the table of GPUs")
    path, out, told = tmp_path / "job.yaml", tmp_path / "two.json", []
    path.write_text(JOB.format(gpu=gpu))
    job = load_job(path, CUTS[name])
    found = calibrate(job, out, 60, True, lambda what, figure: told.append(f"{what}: {figure}"), lambda grid: None)
    print("\n".join(told))
    assert found.exchange
    assert found.exchange.stretches == (name == "an engine a GPU")
    largest = max(found.exchange.sums, key=lambda row: row.nbytes)
    assert largest.nbytes / largest.seconds < job.device.nvlink_gb_s * 1e9
    assert found.surface
    assert all(found.surface.beside(b, 2000, found.surface.all_sms).rate < 1.1 for b in found.surface.batches)
    assert load_job(path, [*CUTS[name], "cluster.calibration=two.json", "sharing.kind=solved"])
