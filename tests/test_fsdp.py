"""FSDP and ZeRO as the serial baseline: bytes a parameter, a reported failure, what a layer saves, rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_activations import flash

from rollplex.backends.fsdp import facts as fsdp
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.models import load_model
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange
from rollplex.ir.work import Work
from rollplex.passes.pipeline import compile_plan

GRPO = load_algorithm("examples/grpo.py")
GIB, PAGE = 2**30, 2 * 2**20
JOB = """\
model: Llama-3.2-3B
cluster: {gpu: H100, gpus_per_node: 4, nodes: 1, host_memory_gb: 1000}
roles:
  actor:
    train: {engine: fsdp}
    rollout: {engine: vllm, kv_cache_gib: 20}
  reference:
    score: {engine: fsdp}
workload: {prompts: 64, group: 8, prompt_tokens: 512, response_tokens: 256}
schedule: serial
"""
SPEC = load_model("Llama-3.2-3B")
EMBED = 128256 * 3072
# q and o, k and v, gate up down, two norms
LAYER = 2 * 3072 * 3072 + 2 * 1024 * 3072 + 3 * 3072 * 8192 + 2 * 3072


def compiled(directory: Path, *overrides: str, text: str = JOB) -> Plan:
    path = directory / "job.yaml"
    path.write_text(text)
    return compile_plan(GRPO, load_job(path, overrides))


# ---- states

# ZeRO stage: bytes a parameter of weights, gradients, masters and moments on each of 4 ranks
STATES = {0: (2, 4, 4, 8), 1: (2, 4, 1, 2), 2: (2, 1, 1, 2), 3: (1, 1, 0, 2)}


@pytest.mark.parametrize("zero", STATES)
def test_what_each_stage_cuts(zero: int, tmp_path: Path) -> None:
    """0: 18 bytes a parameter. 1: 6 + 12/N. 2: 2 + 16/N. 3: 16/N, the FP32 weights are the masters (N = 4)."""
    plan = compiled(tmp_path, f"roles.actor.train.zero={zero}")
    sizes = {o.name: o.bytes for o in plan.summary.objects}
    for name, share in zip(("snapshot", "gradients", "master", "moments"), STATES[zero], strict=True):
        assert sizes.get(f"actor.{name}", 0) == pytest.approx(share * SPEC.parameters, abs=PAGE), name


def test_the_states_of_a_reported_failure(tmp_path: Path) -> None:
    """verl issue 1141: Llama-3.2-3B on 4 GPUs without offload, 16 bytes a parameter over 4: 11.97 GiB a model."""
    plan = compiled(tmp_path)
    states = sum(plan.object(f"actor.{name}").bytes for name in ("snapshot", "gradients", "moments"))
    assert states / GIB == pytest.approx(11.97, abs=0.01)


def test_collectives_follow_the_stage(tmp_path: Path) -> None:
    """Whole weights are gathered after the update, cut ones stay cut; vLLM's copy is refreshed from either."""
    expected = {
        0: [("dp", "all_reduce")],
        1: [("dp", "reduce_scatter"), ("dp", "all_gather")],
        2: [("dp", "reduce_scatter"), ("dp", "all_gather")],
        3: [("dp", "reduce_scatter")],
    }
    for zero, collectives in expected.items():
        plan = compiled(tmp_path, f"roles.actor.train.zero={zero}")
        found = [(s.group, s.op) for s in plan.programs["train"] if isinstance(s, Exchange)]
        assert found == [*collectives, ("refresh", "all_gather")]


# ---- whole sequences


def test_every_response_repeats_its_prompt(tmp_path: Path) -> None:
    """No prefix, no boundary; activations grow with microbatch x (512 + 256) tokens, beyond the gathered units."""
    one, four = compiled(tmp_path), compiled(tmp_path, "roles.actor.train.microbatch=4")
    names = {o.name for o in one.summary.objects}
    assert not {"actor.boundary", "actor.prefix_saved", "reference.boundary"} & names
    units = fsdp.gathered_bytes(work(zero=3)) + 128256 * 3072 * 2  # and the head's gradient
    first, second = (p.object("train.activations").bytes - units for p in (one, four))
    assert second == pytest.approx(4 * first, abs=4 * PAGE)


def work(**changes: Any) -> Work:
    plain: dict[str, Any] = {
        "spec": SPEC, "tp": 1, "itemsize": 2, "sequence_parallel": True, "recompute": True, "prompt_tokens": 64,
        "patches": 0, "responses": 1, "response_tokens": 64,
    }  # fmt: skip
    return Work(**{**plain, **changes})


def test_auto_takes_the_largest_microbatch_that_fits(tmp_path: Path) -> None:
    """Of the divisors of a group of 8: each is compiled as stated, and auto is the largest that is feasible so."""
    small = ("cluster.capacity_gib=45", "workload.prompts=4", "workload.response_tokens=4096")
    fits = {m: compiled(tmp_path, *small, *micro(m)).feasible for m in (1, 2, 4, 8)}
    assert fits == {1: True, 2: True, 4: False, 8: False}
    plan = compiled(tmp_path, *small, *micro("auto"))
    assert plan.feasible
    assert plan.summary.chunks.microbatch.suffix_responses == 2
    stated = compiled(tmp_path, *small, *micro(2))
    assert {o.name: o.bytes for o in plan.summary.objects} == {o.name: o.bytes for o in stated.summary.objects}
    assert not check_plan(plan)


def test_where_none_fits_the_smallest_is_explained(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "cluster.capacity_gib=20", *micro("auto"))
    assert not plan.feasible
    assert plan.summary.chunks.microbatch.suffix_responses == 1


def micro(size: object) -> tuple[str, str]:
    """Of the trained and of the frozen role."""
    return f"roles.actor.train.microbatch={size}", f"roles.reference.score.microbatch={size}"


def test_activations_of_a_microbatch_by_hand() -> None:
    """28 layer inputs, then the logits of every token: bf16, fp32, log-softmax and both gradients, 16 bytes each."""
    w = work(response_tokens=768)
    kept, logits = 768 * 28 * 3072 * 2, 768 * (16 * 128256 + 4 * 3072 * 2)
    assert fsdp.FACTS.train_activation_bytes(w) == kept + logits


def test_gathered_units_by_hand() -> None:
    """The tied embedding and the final norm, this layer and the next in BF16; gradients once in BF16, once in FP32."""
    root = EMBED + 3072
    assert fsdp.layer_parameters(SPEC) == LAYER
    units = 2 * (root + 2 * LAYER)
    assert fsdp.gathered_bytes(work(zero=3)) == units
    waits = 128256 * 3072 * 2
    at = {"head": (5, 9**11, 4), "layer": (5, 4, 9**11), "root": (5, 4, 3)}
    peaks = {place: fsdp.backward_peak_bytes(work(zero=3), *sizes) for place, sizes in at.items()}
    assert peaks == {
        "head": units + waits + 5 + 9**11, "layer": units + waits + 5 + 9**11 + 6 * LAYER, "root": units + 6 * root
    }  # fmt: skip


def test_a_layer_saves_what_transformers_saves() -> None:
    """Qwen2's own decoder layer on the meta device, with attention by the operator that keeps the log-sum-exp."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

    def attention(module: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> tuple[torch.Tensor, None]:
        return flash(*(t[0].transpose(0, 1) for t in (q, k, v)))[None], None

    transformers.AttentionInterface.register("rollplex_flash", attention)
    spec = load_model("Qwen2.5-7B")
    fields = {k: v for k, v in spec.config.items() if k not in ("model_type", "architectures")}
    config = transformers.Qwen2Config(**fields, attn_implementation="rollplex_flash")
    with torch.device("meta"):
        layer = Qwen2DecoderLayer(config, 0).to(torch.bfloat16)
        x = torch.empty(1, 64, spec.hidden, dtype=torch.bfloat16, requires_grad=True)
        rotary = tuple(torch.empty(1, 64, spec.head_dim, dtype=torch.bfloat16) for _ in range(2))
    weights, kept = {p.untyped_storage()._cdata for p in layer.parameters()}, {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in weights:
            kept.setdefault(t.untyped_storage()._cdata, t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        layer(x, position_embeddings=rotary, attention_mask=None)
    measured = sum(t.untyped_storage().nbytes() for t in kept.values()) / 64
    assert measured == pytest.approx(fsdp.layer_bytes(work(spec=spec, recompute=False), 64), rel=0.01)


# ---- offloading and sleeping


def test_nothing_is_offloaded_unless_the_job_says_so(tmp_path: Path) -> None:
    """Moments stay in HBM while vLLM decodes; with offload_optimizer they may leave, and here must."""
    small = "cluster.capacity_gib=36"
    plain = compiled(tmp_path, small)
    assert not plain.feasible
    offloaded = compiled(tmp_path, small, "roles.actor.train.offload_optimizer=true")
    assert offloaded.feasible
    assert offloaded.object("actor.moments").residency["P1 decode"] == "host"
    assert plain.object("actor.moments").residency["P1 decode"] == "hbm"


def test_parameters_may_be_offloaded_too(tmp_path: Path) -> None:
    """They leave while vLLM decodes, and come back for the training window."""
    moves = ("roles.actor.train.offload_optimizer=true", "roles.actor.train.offload_parameters=true")
    plan = compiled(tmp_path, "cluster.capacity_gib=33", *moves)
    assert plan.object("actor.snapshot").residency["P1 decode"] == "host"
    assert plan.object("actor.snapshot").residency["P2 train-actor"] == "hbm"


def test_the_rollout_engine_sleeps_while_the_trainer_works(tmp_path: Path) -> None:
    """vLLM's level 1: its weights wait at the host until the update has given back its room, and are refreshed then."""
    plan = compiled(tmp_path)
    copy = plan.object("rollout.weights")
    assert [copy.residency[w.name] for w in plan.summary.windows] == ["hbm", "host", "host", "host", "hbm"]
    host = {w.name: w.host_bytes for w in plan.summary.windows}
    assert host["P2 train-actor"] - host["P1 decode"] == copy.bytes
    assert copy.bytes == pytest.approx(2 * SPEC.parameters, abs=PAGE)


def test_sleeping_engines_fill_the_host(tmp_path: Path) -> None:
    """OpenRLHF issue 1013: 8 engines of a 7B model keep 8 x 14.19 = 113.5 GiB of a node while they sleep."""
    gpus = JOB.replace("gpus_per_node: 4", "gpus_per_node: 8").replace("Llama-3.2-3B", "Qwen2.5-7B")
    plan = compiled(tmp_path, text=gpus)
    assert 8 * plan.object("rollout.weights").bytes / GIB == pytest.approx(113.5, abs=0.1)


# ---- rules

REFUSED = {
    "overlap": (["schedule=rollplex"], "engine fsdp runs whole sequences after the rollout: nothing of it can overlap"),
    "tensor parallelism": (["roles.actor.train.tensor_parallel=2"], "engine fsdp has no tensor_parallel"),
    "megatron's optimizer": (
        ["roles.actor.train.distributed_optimizer=true"],
        "engine fsdp has no distributed_optimizer",
    ),
    "zero of megatron": (
        ["roles.actor.train.engine=megatron", "roles.actor.train.zero=2"],
        "engine megatron has no zero\n    try: leave it out, or engine: fsdp",
    ),
    "selective": (["roles.actor.recompute=selective"], "engine fsdp recomputes whole layers or nothing"),
    "ulysses": (
        ["model=Qwen2.5-32B", "cluster.gpus_per_node=16", "roles.actor.train.context_parallel=16"],
        "context_parallel 16 cannot deal out the 40 attention and 8 KV heads (Qwen2.5-32B)\n"
        "    try: context_parallel 1 or 2 or 4 or 8 or 40",
    ),
    "a microbatch that is no number": (
        ["roles.actor.train.microbatch=most"],
        "`microbatch`: is 'most'; expected auto or a whole number from 1 to 4096",
    ),
    "microbatch of megatron": (
        ["roles.actor.train.engine=megatron", "roles.actor.train.microbatch=auto"],
        "engine megatron has no microbatch\n    try: leave it out, or engine: fsdp",
    ),
    "two kinds of trainers": (
        ["roles.critic={train: {engine: megatron}}"],
        "engine fsdp of `actor` runs whole sequences, that of `critic` does not\n    try: one kind of trainer a job",
    ),
    "no such engine": (["roles.actor.train.engine=deepspeed"], "no train engine `deepspeed`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp_cannot_do_is_refused(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(JobError) as error:
        compiled(tmp_path, *overrides)
    assert message in str(error.value)


def test_sequence_parallel_ranks_cut_the_tokens(tmp_path: Path) -> None:
    """Ulysses over 2 of 4 ranks: half the tokens of a sequence, the states still over all 4."""
    large = "roles.actor.train.microbatch=8"
    plain, cut = compiled(tmp_path, large), compiled(tmp_path, large, "roles.actor.train.context_parallel=2")
    assert cut.object("actor.moments").bytes == plain.object("actor.moments").bytes
    units = fsdp.gathered_bytes(work(zero=3)) + 128256 * 3072 * 2
    whole, half = (p.object("train.activations").bytes - units for p in (plain, cut))
    assert 2 * half == pytest.approx(whole, abs=2 * PAGE)


def test_no_backend_executes_it(tmp_path: Path) -> None:
    assert "engine fsdp" in compiled(tmp_path).not_executable
