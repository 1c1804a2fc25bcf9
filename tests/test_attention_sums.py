"""What attention's backward sums apart, against what FlashAttention's own source allocates, call by call."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollplex.api import compile_files
from rollplex.backends import attention_sums as a
from rollplex.backends.megatron.facts import FACTS
from rollplex.ir.checker import check_plan
from rollplex.ir.hardware import GPUS, load_gpu
from rollplex.ir.job import load_job
from rollplex.ir.models import load_model
from rollplex.ir.plan import PlannedObject
from rollplex.ir.work import Work, one_response, role_work

GIB, DAPO = 2**30, "examples/jobs/dapo_32b_h800x32.yaml"
THREE_B = load_model("Qwen2.5-VL-3B")


def work(heads: int, gpu: str = "H200", **changes: object) -> Work:
    device = load_gpu(gpu)
    plain = Work(
        spec=replace(THREE_B, heads=heads, kv_heads=1),
        tp=1, itemsize=2, sequence_parallel=False, recompute=True, prompt_tokens=1, patches=0, responses=1,
        response_tokens=1, sms=device.sms, hopper=device.hopper,
    )  # fmt: skip
    return replace(plain, **changes)  # type: ignore[arg-type]


def mha_varlen_bwd(lengths: Sequence[int], heads: int, sms: int, d: int = 128) -> int:
    """dq_accum and softmax_d as csrc/flash_attn/flash_api.cpp makes them of sequences, deterministic."""
    batch_size, total_q, head_size_rounded = len(lengths), sum(lengths), -(-d // 32) * 32
    nsplits = (sms + batch_size * heads - 1) // (batch_size * heads)
    dq_accum = nsplits * (total_q + 128 * batch_size) * heads * head_size_rounded * 4
    return dq_accum + heads * (total_q + 128 * batch_size) * 4


def cudnn(heads: int, queries: int, keys: int) -> int:
    """A gradient of the queries for each 256 keys, one of the keys for each head, a number a row; FP32."""
    rows, columns = -(-queries // 1024) * 1024, -(-keys // 1024) * 1024
    return heads * ((columns // 256 * rows + columns) * 128 * 4 + 4 * rows)


def calls(lengths: Sequence[int], keys: int, heads: int, gpu: str) -> list[int]:
    """Bytes of every call of a backward over responses of these lengths behind so many keys."""
    device = load_gpu(gpu)
    own, seeing = (a.runs(lengths, heads, device.sms, as_one=one) for one in (False, True))
    found = [mha_varlen_bwd(lengths[run], heads, device.sms) for run in own]
    shared = 2 * keys * 128 * 4 if len(seeing) > 1 else 0
    for run in seeing:
        queries = sum(lengths[run])
        blocks = device.hopper and a.sums_apart(heads, queries, -(-keys // 1024) * 1024)
        flash = mha_varlen_bwd([queries], heads, device.sms)
        found.append(shared + (cudnn(heads, queries, keys) if blocks else flash))
    return found


@pytest.mark.parametrize("gpu", ["H200", "H20", "A100-80", "B200"])
@pytest.mark.parametrize(
    ("heads", "most", "tokens", "keys"),
    [(16, 8, 2048, 8192), (16, 32, 10240, 2048), (5, 16, 20480, 2048), (64, 4, 40_000, 512), (128, 9, 12, 300)],
)
def test_no_call_takes_more_than_is_planned(gpu: str, heads: int, most: int, tokens: int, keys: int) -> None:
    """The budget in full, and fewer and shorter responses and prompts; a call has the limit, or a response alone."""
    draw = random.Random(0)
    planned = a.backward_sums_bytes(work(heads, gpu), tokens, keys, most)
    full = max(calls([tokens] * most, keys, heads, gpu))
    for _ in range(200):
        count, longest = draw.randint(1, most), draw.choice([tokens, draw.randint(1, tokens)])
        lengths = [draw.randint(1, longest) for _ in range(count)]
        assert max(calls(lengths, draw.randint(1, keys), heads, gpu)) <= planned
    alone = mha_varlen_bwd([tokens], heads, load_gpu(gpu).sms)
    assert full <= planned <= max(a.LARGEST_SUMS, alone) + 2 * keys * 128 * 4


@pytest.mark.parametrize(("heads", "tokens"), [(16, 6144), (5, 16384), (4, 4096), (16, 327_680), (20, 100)])
def test_one_prompt_has_what_its_one_call_takes(heads: int, tokens: int) -> None:
    """On a GPU without cuDNN's: to the byte, whatever its length."""
    assert a.backward_sums_bytes(work(heads, "A100-80"), tokens, tokens) == mha_varlen_bwd([tokens], heads, 108)


def test_long_responses_in_runs() -> None:
    """16 heads, 32 x 10240 tokens over a prompt of 4096: 24 GB by one call, 2 GiB and FP32 gradients of the prompt."""
    lengths = [10240] * 32
    assert mha_varlen_bwd([327_680], 16, 132) == 24_189_607_936
    assert a.runs(lengths, 16, 132, as_one=True) == [slice(i, i + 2) for i in range(0, 32, 2)]
    assert a.runs(lengths, 16, 132, as_one=False) == [slice(0, 25), slice(25, 32)]
    shared = 2 * 4096 * 1 * 128 * 4
    assert a.backward_sums_bytes(work(16), 10240, 4096, 32) == 2 * GIB + shared


def test_a_response_longer_than_the_limit_is_a_run() -> None:
    """Of 40000 tokens: it is planned with what its own call takes, however many there are."""
    alone = mha_varlen_bwd([40_000], 16, 132)
    assert alone > a.LARGEST_SUMS
    assert a.runs([40_000, 40_000, 10, 10, 40_000], 16, 132, as_one=True) == [
        slice(0, 1), slice(1, 2), slice(2, 4), slice(4, 5)
    ]  # fmt: skip
    assert a.backward_sums_bytes(work(16), 40_000, 4096, 1) == alone
    assert a.backward_sums_bytes(work(16), 40_000, 4096, 8) == alone + 2 * 4096 * 128 * 4


@pytest.mark.parametrize("as_one", [True, False])
def test_runs_are_whole_responses_in_their_order(as_one: bool) -> None:
    draw = random.Random(1)
    for _ in range(100):
        lengths = [draw.randint(0, 20_000) for _ in range(draw.randint(1, 40))]
        found = a.runs(lengths, 16, 132, as_one=as_one)
        assert [i for run in found for i in range(len(lengths))[run]] == list(range(len(lengths)))
        for run, after in zip(found, [*found[1:], None], strict=True):
            assert run.stop - run.start == 1 or taken(lengths[run], as_one) <= a.LARGEST_SUMS
            if after is not None:  # the next response had no room
                assert taken(lengths[run.start : run.stop + 1], as_one) > a.LARGEST_SUMS


def taken(lengths: Sequence[int], as_one: bool) -> int:
    return mha_varlen_bwd([sum(lengths)] if as_one else lengths, 16, 132)


def test_the_plan_counts_the_sms_of_its_gpu() -> None:
    """Qwen2.5-VL-7B's 28 heads: an A100 has ceil(108 / 28) SMs a head and no cuDNN, a B200 ceil(148 / 28)."""
    seen = {gpu: a.backward_sums_bytes(work(28, gpu), 4096, 4096) for gpu in ("A100-80", "H800", "B200")}
    rows = 28 * (4096 + 128)
    assert seen["A100-80"] == rows * (4 * 512 + 4)
    assert seen["B200"] == rows * (6 * 512 + 4)
    assert seen["H800"] == cudnn(28, 4096, 4096) > seen["B200"]
    assert [gpu.name for gpu in GPUS if gpu.hopper] == ["H100", "H800", "H200", "H20"]


def test_a_job_of_long_responses() -> None:
    """DAPO's 8 x 20480 tokens at 32B, TP 8: 10.7 GiB less 8.7; all else of a suffix step is as it was."""
    job = load_job(DAPO)
    eight, one = (one_response(role_work(job, "actor"), n) for n in (8, 1))
    sums = 2 * GIB + 2 * 2048 * 1 * 128 * 4
    assert a.backward_sums_bytes(eight, 20480, 2048, 8) == sums
    assert mha_varlen_bwd([8 * 20480], 5, 132) == pytest.approx(10.6 * GIB, rel=0.01)
    alone = mha_varlen_bwd([20480], 5, 132)
    boundary = 2048 * eight.kv_bytes
    a_token = (FACTS.train_activation_bytes(one) - boundary - alone) // 20480
    assert FACTS.train_activation_bytes(eight) == 8 * 20480 * a_token + sums + boundary


def test_a_plan_of_other_sums_is_refused() -> None:
    """One call for all responses, or another GPU's SMs: a page is one too many, and the checker says what is right."""
    plan = compile_files("examples/dapo.py", DAPO, ["cluster.gpu=A800-80"]).plan
    o, responses = plan.object("train.activations"), plan.summary.chunks.microbatch.suffix_responses
    one_call = mha_varlen_bwd([20480 * responses], 5, 108) - 2 * GIB
    assert responses > 1
    assert not check_plan(plan)
    for nbytes in (o.bytes + one_call, o.bytes - 2 * GIB):
        objects = tuple(replaced(x, nbytes) if x.name == o.name else x for x in plan.summary.objects)
        broken = plan.model_copy(update={"summary": plan.summary.model_copy(update={"objects": objects})})
        assert [p for p in check_plan(broken) if f"train.activations has {nbytes:,} bytes, the job's" in str(p)]


def replaced(o: PlannedObject, nbytes: int) -> PlannedObject:
    return o.model_copy(update={"bytes": nbytes})


def test_unfused_attention_has_none() -> None:
    assert not a.backward_sums_bytes(work(16, unfused=True), 4096, 4096, 8)
    assert not a.backward_sums_bytes(work(16), 0, 4096, 8)
