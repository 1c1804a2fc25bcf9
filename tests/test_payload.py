"""The bytes of a step's batch, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_texts import edited, write

from rollplex import api
from rollplex.ir.job import load_job
from rollplex.passes.payload import batch_bytes, pixel_bytes

ROOT = Path(__file__).resolve().parent.parent


def test_tokens_and_pixels_by_hand(tmp_path: Path) -> None:
    """Ids and masks of prompts, ids, log-probs and masks of responses, and bf16 pixels of 4 patches a visual token."""
    job = load_job(write(tmp_path, edited(("frames: 16", "frames: 16\n  max_pixels: 602112"))))
    patches = 8 * 768 * 4  # two frames a patch, 768 tokens a frame, four patches a token
    pixels = patches * 3 * 2 * 14 * 14 * 2
    assert pixel_bytes(job) == pixels
    assert batch_bytes(job) == 32 * (8192 * 9 + pixels + 8 * 2048 * 13)


def test_text_has_no_pixels(tmp_path: Path) -> None:
    """Without frames the same model reads text alone; of more samples only the responses grow."""
    text = edited(("  frames: 16\n", ""), ("group: 8", "group: 1"))
    one, eight = (load_job(write(tmp_path, text), [f"workload.group={n}"]) for n in (1, 8))
    assert pixel_bytes(one) == 0
    assert batch_bytes(eight) - batch_bytes(one) == 32 * 7 * 2048 * 13


def test_a_batch_that_crowds_the_host_does_not_fit() -> None:
    """What the pinned pools and the processes leave of a node holds the batch, or the plan is infeasible.

    What prefixes save is kept: run again with their groups they leave room.
    """
    grpo, job = str(ROOT / "examples/grpo.py"), ROOT / "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
    kept = ("cluster.pinned_share=1", "roles.actor.prefix_saved=host")
    sizes = ([f"cluster.host_memory_gb={n}", *kept] for n in (1400, 670))
    roomy, crowded = (api.compile_files(grpo, job, overrides).plan for overrides in sizes)
    assert roomy.summary.batch_bytes == pytest.approx(2.31 * 2**30, rel=0.01)
    assert roomy.feasible
    assert crowded.summary.node.pinned_bytes + crowded.summary.node.process_bytes < 670 * 10**9
    assert crowded.infeasible is not None
    assert crowded.infeasible.resource == "node"
    assert crowded.infeasible.objects[-1].name == "node.batch"
