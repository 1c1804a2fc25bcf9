"""vLLM's share of the total memory: what it leaves for KV, against reported configurations, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_texts import GOOD, edited, refusal, write

from rollplex.backends.vllm import facts as vllm
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.models import load_model
from rollplex.ir.serving import Serving, budget, weight_bytes
from rollplex.passes.pipeline import compile_plan

GRPO = load_algorithm("examples/grpo.py")
GIB, MIB = 2**30, 2**20
ROLLOUT = "roles.actor.rollout."


def setup(name: str, tp: int, ways: int = 1, batched: int = 8192, sequences: int = 256) -> Serving:
    return Serving(load_model(name), tp, 2, batched, sequences, 16384, ways)


def test_weights_of_the_72b_report_with_the_tower_cut_or_whole() -> None:
    """vllm issue 16570: Qwen2.5-VL-72B at TP 4 is 34.18 GiB a card with the tower cut, 35.17 with it on every card."""
    assert weight_bytes(setup("Qwen2.5-VL-72B", 4, ways=4)) / GIB == pytest.approx(34.18, abs=0.01)
    assert weight_bytes(setup("Qwen2.5-VL-72B", 4)) / GIB == pytest.approx(35.17, abs=0.02)


def test_weights_and_kv_of_the_235b_report() -> None:
    """Qwen3-VL issue 1489: 54.87 GiB a card at TP 8; 47 KiB a token, so 262144 tokens take 11.75 GiB, 41960 1.88."""
    spec = load_model("Qwen3-VL-235B-A22B")
    cut = -(-spec.parameters * 2 // 8)
    assert cut / GIB == pytest.approx(54.87, abs=0.01)
    token = spec.kv_bytes_per_token(8)  # 4 KV heads on 8 ranks: each is held twice
    assert token == 47 * 1024
    assert (262144 * token / GIB, 41960 * token / GIB) == (pytest.approx(11.75), pytest.approx(1.88, abs=0.01))


def test_the_share_is_of_the_total_memory(tmp_path: Path) -> None:
    """kv = 0.6 x 79.1 - 15.26 - 1.28 (tower) - stated 3 - 774 and 840 MiB (context, NCCL over 4 ranks)."""
    text = edited(("      kv_cache_gib: 29\n", "      gpu_memory_utilization: 0.6\n"))
    job = load_job(write(tmp_path, text))
    spec = load_model("Qwen2.5-VL-32B")
    weights = 2 * (spec.rank_parameters(4, "language") + spec.vision_parameters)
    left = int(0.6 * round(79.1 * GIB)) - weights - 3 * GIB - (774 + 840 + 485 + 24) * MIB
    assert job.kv_cache_bytes == left // (2 * MIB) * 2 * MIB
    plan = compile_plan(GRPO, job)
    assert plan.object("rollout.kv").bytes == job.kv_cache_bytes
    assert plan.object("rollout.runtime").bytes == 3 * GIB


def test_the_profile_by_hand() -> None:
    """7B, TP 1: 8192 tokens in one MLP, 256 sequences' logits six times over, a GiB of graphs; the tower, if larger."""
    s, text = setup("Qwen2.5-VL-7B", 1), setup("Qwen2.5-7B", 1)
    step = 8192 * (2 * 3584 + 3 * 18944) * 2
    logits = 256 * 152064 * (2 + 4 + 4 + 8 + 4 + 4)
    assert vllm.FACTS.profile_bytes(text) == step + logits + GIB
    patches = 16384 * 4
    tower = patches * (5 * 1280 + 3 * 3420) * 2 + 16384 * 3584 * 2
    assert vllm.FACTS.profile_bytes(s) == max(step, tower) + logits + GIB


def test_the_largest_image_is_the_processors(tmp_path: Path) -> None:
    """vllm issue 18550: the engine profiles 16384 tokens an image, a processor bound of 768 x 28 x 28 pixels is 768."""
    text = edited(("      kv_cache_gib: 29\n      runtime_gib: 3\n", "      gpu_memory_utilization: 0.6\n"))
    path = write(tmp_path, text.replace("  frames: 16", f"  frames: 2\n  max_pixels: {768 * 28 * 28}"))
    small = load_job(path, [ROLLOUT + "max_num_batched_tokens=512"])
    worst = load_job(path, [ROLLOUT + "max_num_batched_tokens=512", "workload.max_pixels=null"])
    tokens = 16384 - 768
    vision = small.spec.vision
    assert vision is not None
    token = 4 * (5 * vision.hidden + 3 * vision.ffn) + small.spec.hidden
    assert worst.runtime_bytes - small.runtime_bytes == tokens * token * 2


def test_what_does_not_fit_the_cache_queues_and_is_told(tmp_path: Path) -> None:
    """16 prompts x 8 responses on an engine whose cache holds fewer whole sequences: legal for vLLM, worth a note."""
    text = edited(("      kv_cache_gib: 29\n", "      gpu_memory_utilization: 0.4\n"))
    notes = load_job(write(tmp_path, text)).notes()
    assert any("whole sequences of 128: the rest queue" in n for n in notes)


REFUSED = {
    "both": (
        ROLLOUT + "gpu_memory_utilization=0.5",
        "kv_cache_gib and gpu_memory_utilization both say how much KV there is\n    try: one of them",
    ),
    "length": (
        ROLLOUT + "max_model_len=8192",
        "max_model_len 8192 is less than 8192 + 2048 tokens: responses would be cut off without a word\n"
        "    try: max_model_len: 10240",
    ),
    "a trained tower": (
        ROLLOUT + "mm_encoder_tp_mode=weights roles.actor.freeze=[]",
        "a trained tower is read by both engines as one whole copy",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_rollout_section_that_cannot_be_is_refused(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    assert message in str(refusal(tmp_path, GOOD, *overrides.split()))


def test_neither_budget_is_refused(tmp_path: Path) -> None:
    text = edited(("      kv_cache_gib: 29\n", ""))
    assert "`kv_cache_gib` is missing\n    try: kv_cache_gib, or gpu_memory_utilization" in str(refusal(tmp_path, text))


def test_a_tower_whose_width_does_not_divide_cannot_be_cut(tmp_path: Path) -> None:
    """3420 = 4 x 855: at TP 8 vLLM's tower cannot be cut."""
    overrides = ["model.name=Qwen2.5-VL-3B", ROLLOUT + "tensor_parallel=8", ROLLOUT + "mm_encoder_tp_mode=weights"]
    message = "tensor_parallel 8 does not divide the tower's 16 heads and feed-forward 3420"
    assert message in str(refusal(tmp_path, GOOD, *overrides))


def test_too_little_for_one_sequence_is_refused_with_numbers(tmp_path: Path) -> None:
    """A100-40 (39.4 GiB), 0.45 of it: weights of 16.5 GiB leave less than nothing beside the profile."""
    text = edited(("gpu: H800", "gpu: A100-40"), ("      kv_cache_gib: 29\n", "      gpu_memory_utilization: 0.45\n"))
    error = str(refusal(tmp_path, text))
    assert "0.45 of 39.4 GiB is 17.7 GiB: weights 16.5 GiB, profile peak 3.0 GiB and context 2.1 GiB leave" in error
    assert "less than nothing, and one sequence of 10240 tokens takes 640.0 MiB" in error


def test_a_cut_tower_is_a_second_copy(tmp_path: Path) -> None:
    """mm_encoder_tp_mode weights: the trainer's whole tower, and a quarter of it in the rollout engine."""
    plan = compile_plan(GRPO, load_job(write(tmp_path, GOOD), [ROLLOUT + "mm_encoder_tp_mode=weights"]))
    whole, quarter = plan.object("actor.vision"), plan.object("rollout.vision")
    assert quarter.bytes == pytest.approx(whole.bytes / 4, abs=2 * MIB)
    assert not whole.readers


def test_a_stated_budget_divides_nothing(tmp_path: Path) -> None:
    assert budget(load_job(write(tmp_path, GOOD))) is None
