"""On a GPU: a quick calibration of a small model, whose file a job takes and a plan is solved by."""

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
