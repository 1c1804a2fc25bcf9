"""Parameters of the Megatron model are views of flat memory, alone or as slabs of a rollout shard.

TP 2 trains, TP 1 rolls out     |embed0|embed1|qkv0|qkv1|bias0|bias1|o0.t|o1.t|gate0|gate1|up0|up1| .. |norm| ..
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, oracle_model, responses_of, text_prompt, tied
from megatron_tiny import CASE_2, Case, make_rank
from torch import Tensor

from rollplex.backends.megatron import memory
from rollplex.backends.megatron.memory import Slab
from rollplex.backends.megatron.model import build_model
from rollplex.backends.megatron.names import Stored, parameters
from rollplex.backends.megatron.rank import MegatronModel
from rollplex.backends.megatron.weights import fill
from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job
from rollplex.ir.models import ModelSpec, spec_from_config
from rollplex.passes.layout import decide
from rollplex.passes.layout_summary import summarise

JOB = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"


class OneOf:
    """A group that only says who it is: nothing can be sent."""

    def __init__(self, size: int, rank: int) -> None:
        self._size, self._rank = size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return spec_from_config(config, "tiny")


def weights_of(config: dict[str, Any]) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in oracle_model(config, torch.float32).named_parameters()}


@pytest.mark.parametrize("stored", [Stored(), CASE_2], ids=["stock", "case 2"])
def test_every_parameter_is_a_view_of_its_pages(stored: Stored) -> None:
    """No copy: addresses follow the flat order without a gap, and who writes the pages writes the model."""
    rank, pages = make_rank(CONFIG, weights_of(CONFIG), torch.float32, case=Case(stored))
    for part, flat in pages.items():
        at = flat.data_ptr()
        for parameter in rank.of(part):
            assert rank.model.get_parameter(parameter.name).data_ptr() == at, parameter.name
            at += parameter.numel * flat.element_size()
        assert at == flat.data_ptr() + flat.nbytes
    prompt, slot = text_prompt(), torch.zeros(rank.boundary_shape(10))
    found = []
    for _ in range(2):
        prefix = rank.prefix(prompt, slot, attached=False)
        found.append(rank.logprobs(prefix, prefix.kv, responses_of([3]), 1.0).detach())
        pages["language"].mul_(1.5)
    assert not torch.equal(*found)


def test_megatron_can_tell_shares_from_copies() -> None:
    """Megatron sets these attributes only where it initialises weights itself."""
    spec, group = spec_of(CONFIG), OneOf(2, 1)
    order = parameters(spec, 2, 1, CASE_2)
    model = build_model(spec, torch.float32, group, CASE_2)
    memory.bind(model, order, memory.views(torch.zeros(memory.numel(order)), order))
    layer = "language.decoder.layers.0."
    cut = {
        "self_attention.linear_qkv.weight": 0, "self_attention.linear_proj.weight": 0, "mlp.linear_fc1.up.weight": 0,
        "mlp.linear_fc2.weight": 0, "input_layernorm.weight": -1,
    }  # fmt: skip
    for name, axis in cut.items():
        parameter: Any = model.get_parameter(layer + name)
        assert (parameter.tensor_model_parallel, parameter.partition_dim) == (axis >= 0, axis)
    assert not model.get_parameter("vision.blocks.0.mlp.linear_fc2.weight").tensor_model_parallel  # type: ignore


# ---- slabs of a rollout shard


def stock_shard(weights: dict[str, Tensor], config: dict[str, Any]) -> Iterator[Tensor]:
    """One rollout rank that has everything, as vLLM stores it, but for QKV, which lies in the trainer's order."""
    text = config["text_config"]
    rows = {n.removeprefix("model.language_model."): t for n, t in weights.items()}
    yield rows["embed_tokens.weight"]
    for layer in range(text["num_hidden_layers"]):
        of = {n.removeprefix(f"layers.{layer}."): t for n, t in rows.items() if n.startswith(f"layers.{layer}.")}
        for leaf in ("weight", "bias"):
            q, k, v = (of[f"self_attn.{part}_proj.{leaf}"].unflatten(0, (2, -1)) for part in "qkv")
            yield torch.cat([q, k, v], dim=1)
        yield of["self_attn.o_proj.weight"].t()
        yield of["mlp.gate_proj.weight"]
        yield of["mlp.up_proj.weight"]
        yield of["mlp.down_proj.weight"].t()
        yield of["input_layernorm.weight"]
        yield of["post_attention_layernorm.weight"]
    yield rows["norm.weight"]
    yield rows["lm_head.weight"]


def test_two_ranks_fill_the_shard_of_one_rollout_rank() -> None:
    """Cases 1 and 2: slab j of every tensor is training rank j's, and all slabs together are vLLM's own tensors."""
    weights = weights_of(CONFIG)
    wanted = torch.cat([t.reshape(-1) for t in stock_shard(weights, CONFIG)])
    shard = torch.full_like(wanted, float("nan"))
    for j in range(2):
        order = [p for p in parameters(spec_of(CONFIG), 2, j, CASE_2) if p.part == "language"]
        assert memory.numel(order, Slab(j, 2)) == len(shard)
        views = memory.views(shard, order, Slab(j, 2))
        before = shard.isnan().sum()
        fill(order, views, lambda p: weights[p.source].narrow(p.axis, p.start, p.stop - p.start))
        assert before - shard.isnan().sum() >= memory.numel([p for p in order if p.sharded])
    assert torch.equal(shard, wanted)


def test_interleaved_gate_and_up_lie_one_rank_behind_the_other() -> None:
    """[gate0; up0; gate1; up1]: what the compiler calls `interleave`."""
    weights, spec = weights_of(CONFIG), spec_of(CONFIG)
    name = "language.decoder.layers.0.mlp.linear_fc1.weight"
    orders = [[p for p in parameters(spec, 2, j) if p.part == "language"] for j in range(2)]
    shard = torch.zeros(memory.numel(orders[0], Slab(0, 2)))
    for j, order in enumerate(orders):
        views = memory.views(shard, order, Slab(j, 2))
        fill(order, views, lambda p: weights[p.source].narrow(p.axis, p.start, p.stop - p.start))
    at = memory.starts(orders[0], Slab(0, 2))[name]
    gate, up = (weights[f"model.language_model.layers.0.mlp.{part}_proj.weight"].chunk(2) for part in ("gate", "up"))
    wanted = torch.cat([gate[0], up[0], gate[1], up[1]])
    assert torch.equal(shard[at : at + wanted.numel()].view_as(wanted), wanted)


def test_the_shards_bytes_are_the_compilers() -> None:
    """Whatever q: a snapshot has the bytes of the rollout rank's shard."""
    for config in (CONFIG, tied(CONFIG)):
        spec = spec_of(config)
        for tp, q in ((1, 1), (2, 1), (2, 2)):
            order = [p for p in parameters(spec, tp, 0) if p.part == "language"]
            assert memory.numel(order, Slab(0, q)) == spec.rank_parameters(tp // q, "language")


@pytest.mark.parametrize(
    ("order", "rollout", "wanted"),
    [("stock", 4, CASE_2), ("reindex", 4, Stored(frozenset({"o", "down"}))), ("stock", 8, Stored())],
)
def test_a_plan_says_what_is_stored_apart(order: Any, rollout: int, wanted: Stored) -> None:
    """TP 8 to 4: o and down are [I, O], and in stock order gate and up lie in two slabs; TP 8 to 8: nothing of it."""
    job = load_job(JOB, (f"roles.actor.rollout.tensor_parallel={rollout}",))
    assert Stored.planned(summarise(job, decide(job, order), {})) == wanted


# ---- refusals


def test_what_cannot_be_cut_is_refused() -> None:
    """6 heads in 4, 2 KV heads in 6: the message has all of it and the degrees that are possible."""
    with pytest.raises(JobError, match=r"tensor_parallel 4 does not divide the 6 attention heads.*") as caught:
        build_model(spec_of(CONFIG), torch.float32, OneOf(4, 0))
    assert "tensor_parallel 1, 2" in str(caught.value)
    many = {**CONFIG["text_config"], "num_attention_heads": 8, "hidden_size": 64, "num_key_value_heads": 2}
    vision = {**CONFIG["vision_config"], "out_hidden_size": 64}
    with pytest.raises(JobError, match="the 2 KV heads: the megatron backend repeats none"):
        build_model(spec_of({**CONFIG, "text_config": many, "vision_config": vision}), torch.float32, OneOf(4, 0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3_vl"}, "runs model_type qwen2_5_vl, not 'qwen3_vl'"),
        ({"text_config": {**CONFIG["text_config"], "attention_dropout": 0.1}}, "has no attention dropout"),
        ({"text_config": {**CONFIG["text_config"], "hidden_act": "gelu"}}, "has no activation but silu"),
    ],
)
def test_another_architecture_is_refused(change: dict[str, Any], message: str) -> None:
    """What the backend would compute wrongly is not built."""
    with pytest.raises(JobError, match=message):
        build_model(replace(spec_of(CONFIG), config={**CONFIG, **change}), torch.float32)


def test_wrong_memory_is_our_own_mistake() -> None:
    """A view of another dtype is never bound."""
    order = parameters(spec_of(CONFIG))
    pages = {
        part: torch.zeros(memory.numel([p for p in order if p.part == part]), dtype=torch.float64)
        for part in ("language", "vision")
    }
    with pytest.raises(AssertionError, match=r"language\..*float64"):
        MegatronModel(spec_of(CONFIG), torch.float32, pages)  # type: ignore[arg-type]
