"""Sequence parallelism by heads: what a layer saves as autograd counts it, tokens of a rank, seconds, legal degrees."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from job_texts import write
from test_activations import flash
from torch import Tensor

from rollplex.backends.fsdp import facts as fsdp
from rollplex.backends.fsdp import ulysses
from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job
from rollplex.ir.models import load_model
from rollplex.ir.work import Work, role_work, whole_call
from rollplex.passes.costs import Costs

SPEC = load_model("Qwen2.5-14B")  # 40 heads, 8 KV heads
LOCAL = 64
JOB = """\
model: Qwen2.5-14B
cluster: {gpu: H100, gpus_per_node: 8, nodes: 5, host_memory_gb: 1000}
roles:
  actor:
    train: {engine: fsdp, context_parallel: 8}
    rollout: {engine: vllm, tensor_parallel: 4, kv_cache_gib: 20}
  reference:
    score: {engine: fsdp, context_parallel: 8}
workload: {prompts: 40, group: 4, prompt_tokens: 512, response_tokens: 1536}
schedule: serial
"""


def rank(sp: int, **changes: object) -> Work:
    plain: dict[str, object] = {
        "spec": SPEC, "tp": 1, "itemsize": 2, "sequence_parallel": True, "recompute": False, "prompt_tokens": 0,
        "patches": 0, "responses": 1, "response_tokens": LOCAL * sp, "cp": sp, "by_heads": True,
    }  # fmt: skip
    return Work(**{**plain, **changes})  # pyright: ignore[reportArgumentType]


def swapped(x: Tensor, sp: int, inward: bool) -> Tensor:
    """An all-to-all: [tokens, heads, dim] to [tokens * sp, heads / sp, dim] or back, as a tensor of its own."""
    tokens, heads, dim = x.shape
    shape = (tokens * sp, heads // sp, dim) if inward else (tokens // sp, heads * sp, dim)
    return x.reshape(shape).clone()


def attention_saves(sp: int) -> int:
    """Bytes that q, k, v, attention and its output projection keep on one of sp ranks, each storage once."""
    heads, kv, dim = SPEC.heads, SPEC.kv_heads, SPEC.head_dim
    kept: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        kept.setdefault(t.untyped_storage()._cdata, t)
        return t

    with torch.device("meta"):
        q, k, v = (torch.empty(LOCAL, n, dim, dtype=torch.bfloat16, requires_grad=True) for n in (heads, kv, kv))
        out_proj = torch.nn.Parameter(torch.empty(SPEC.hidden, heads * dim, dtype=torch.bfloat16))
    parameters = {out_proj.untyped_storage()._cdata}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        repeats = max(sp // kv, 1)
        k, v = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        if sp == 1:
            out = flash(q, k, v)
        else:
            out = swapped(flash(*(swapped(t, sp, inward=True) for t in (q, k, v))), sp, inward=False)
        torch.nn.functional.linear(out.reshape(LOCAL, -1), out_proj)
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in parameters)


@pytest.mark.parametrize("sp", [2, 4, 8, 40])
def test_what_is_saved_beyond_whole_sequences(sp: int) -> None:
    """The second output, and from 8 ranks on a KV head for each of them, as torch keeps them."""
    assert attention_saves(sp) - attention_saves(1) == LOCAL * ulysses.saved_bytes(rank(sp))
    assert ulysses.saved_bytes(rank(1)) == 0


@pytest.mark.parametrize("sp", [2, 4, 8, 40])
def test_tokens_and_logits_of_a_rank(sp: int) -> None:
    """A microbatch is padded to a multiple of the ranks as one text: a rank has a share of its layers and logits."""
    recomputing = rank(sp, recompute=True, responses=3, response_tokens=1001)
    tokens = -(-3 * 1001 // sp)
    head = 16 * SPEC.outputs + 4 * SPEC.hidden * 2
    again = fsdp.layer_bytes(recomputing, 1001)
    expected = tokens * SPEC.layers * SPEC.hidden * 2 + tokens * max(head, again)
    assert fsdp.FACTS.train_activation_bytes(recomputing) == expected


def test_live_around_attention_by_hand() -> None:
    """Residual, norm and their copies; q, k, v and the output with all heads of some tokens, and the other way."""
    both = (2 * 40 + 2 * 8) + (2 * 40 + 2 * 40)
    assert ulysses.layer_forward_bytes(rank(40), 4096) == 2 * (4 * SPEC.hidden + max(both * 128, 3 * SPEC.ffn))
    assert ulysses.layer_forward_bytes(rank(1), 4096) == ulysses.layer_forward_bytes(rank(1, by_heads=False), 4096)


def test_swapping_takes_time(tmp_path: Path) -> None:
    """8 ranks of a node swap 7/8 of 96 heads of each token, 40 ranks 39/40 of 160 over their share of the network."""
    near = load_job(write(tmp_path, JOB))
    wide = [f"roles.{section}.context_parallel=40" for section in ("actor.train", "reference.score")]
    far = load_job(write(tmp_path, JOB), wide)
    for job, heads, sp, rate in ((near, 96, 8, 900e9 * 0.4), (far, 160, 40, 50e9 / 8)):
        work = whole_call(role_work(job, "actor"))
        seconds = 2048 / sp * heads * 128 * 2 * (sp - 1) / sp / rate
        assert Costs(job).all_to_all_s(work, 2048) == pytest.approx(seconds)
    assert Costs(near).all_to_all_s(rank(1), 2048) == 0


LEGAL = {4: True, 8: True, 16: False, 40: True, 5: False, 20: False}


@pytest.mark.parametrize("sp", LEGAL)
def test_which_degrees_are_legal(sp: int, tmp_path: Path) -> None:
    """sp divides the 40 heads, and divides the 8 KV heads or is a multiple of them: 40 is, 20 and 16 are not."""
    overrides = [f"roles.actor.train.context_parallel={sp}", f"roles.reference.score.context_parallel={sp}"]
    path = write(tmp_path, JOB.replace("prompts: 40", "prompts: 80"))
    if LEGAL[sp]:
        assert load_job(path, overrides).data_parallel("actor") == 40 // sp
        return
    with pytest.raises(JobError) as error:
        load_job(path, overrides)
    assert f"context_parallel {sp} cannot deal out the 40 attention and 8 KV heads (Qwen2.5-14B)" in str(error.value)
    assert "try: context_parallel 1 or 2 or 4 or 8 or 40" in str(error.value)
