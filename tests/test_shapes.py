"""The shapes example: videos show what their answers say, and the warm start trains what it says it trains."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from examples.shapes.make import COLOURS, FRAMES, SIDE, WAYS, make, random_scene, render
from examples.shapes.reward import answer_text, exact_answer
from examples.shapes.warm_start import HERE, SPEC, Course, random_model, response_loss, warm_start
from rollplex.backends.data.rows import read_rows
from rollplex.backends.data.tokens import byte_tokenizer, load_tokenizer
from rollplex.backends.data.video import decode_video
from rollplex.backends.hf.model import read_config

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shapes")
    make(folder, videos=9, heldout=2, seed=3)
    return folder


def shape_of(frame: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Centre (x, y) and mean colour of what is clearly brighter than the background."""
    y, x = np.nonzero(frame.max(axis=-1).astype(float) - np.median(frame) > 60)
    return np.array([x.mean(), y.mean()]), frame[y, x].mean(axis=0)


def test_every_video_shows_what_its_answers_say(data: Path) -> None:
    """Decoded from the file: the shape moves the way it should and has the colour it should, three rows a video."""
    rows = [*read_rows(data / "train.jsonl"), *read_rows(data / "heldout.jsonl")]
    assert len(rows) == 33
    answers = {(row.video, row.extra["kind"]): row.answer for row in rows}
    for row in rows:
        assert row.video is not None
        frames = decode_video(row.video, FRAMES).frames
        (start, seen), (end, _) = shape_of(frames[0]), shape_of(frames[-1])
        moved = end - start
        way = max(WAYS, key=lambda w: float(np.dot(moved, WAYS[w])))
        assert way == answers[row.video, "way"]
        nearest = min(COLOURS, key=lambda c: float(np.abs(seen - np.array(COLOURS[c])).sum()))
        assert nearest == answers[row.video, "colour"]


def test_one_seed_gives_the_same_bytes(data: Path, tmp_path: Path) -> None:
    """Files and rows repeat; another seed gives other videos."""
    make(tmp_path / "again", videos=9, heldout=2, seed=3)
    make(tmp_path / "other", videos=9, heldout=2, seed=4)
    for name in ("train.jsonl", "heldout.jsonl", "clips/0000.mp4", "clips/0010.mp4"):
        assert (data / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert (data / "clips/0000.mp4").read_bytes() != (tmp_path / "other" / "clips/0000.mp4").read_bytes()


def test_no_shape_leaves_the_frame() -> None:
    """Of 200 scenes, none touches the border in its first or last frame."""
    rng = random.Random(0)
    for _ in range(200):
        scene = random_scene(rng)
        first, *_, last = render(scene)
        for frame in (first, last):
            border = np.concatenate([frame[0], frame[-1], frame[:, 0], frame[:, -1]])
            assert frame.shape == (SIDE, SIDE, 3)
            assert (border == scene.background).all()


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<answer>left</answer>", 1.0),
        ("It moves <answer> Left </answer>", 1.0),
        ("<answer>right</answer>", 0.0),
        ("left", 0.0),
        ("<answer>left</answer><answer>right</answer>", 0.0),
        ("<answer>left", 0.0),
        ("", 0.0),
    ],
)
def test_the_rule(response: str, score: float) -> None:
    """One answer in tags, and the right one."""
    assert exact_answer("Which way does the shape move?", "left", response, {}) == score


def test_the_loss_is_that_of_each_response_alone(data: Path) -> None:
    """Padded together with one tower pass a video, or one sequence at a time through transformers' own forward."""
    config = read_config(HERE / "model")
    course = Course.of(data / "train.jsonl", config, byte_tokenizer())
    model, _ = random_model(config, 0)
    videos = course.batch(random.Random(0), 0.0)[:3]
    total, count = 0.0, 0
    with torch.no_grad():
        for prompt, response in (sample for video in videos for sample in video):
            ids = torch.cat([prompt.input_ids, response])[None]
            logits = model(
                input_ids=ids,
                pixel_values_videos=prompt.pixel_values,
                video_grid_thw=prompt.grid_thw,
                mm_token_type_ids=(ids == model.config.video_token_id).int() * 2,
                second_per_grid_ts=torch.tensor([prompt.seconds_per_grid]),
                use_cache=False,
            ).logits[0, len(prompt.input_ids) - 1 : -1]
            total += float(torch.nn.functional.cross_entropy(logits, response, reduction="sum"))
            count += len(response)
        assert float(response_loss(model, videos)) == pytest.approx(total / count, abs=1e-5)


def test_a_share_of_the_answers_is_drawn_at_random(data: Path) -> None:
    """wrong = 0: every answer is the row's; wrong = 1: right only by luck."""
    tokenizer = byte_tokenizer()
    course = Course.of(data / "train.jsonl", read_config(HERE / "model"), tokenizer)

    def right(wrong: float) -> float:
        rng = random.Random(0)
        samples = [s for _ in range(4) for video in course.batch(rng, wrong) for s in video]
        says = [answer_text(p.answer) == tokenizer.decode(r[:-1]) for p, r in samples]
        return sum(says) / len(says)

    assert right(0.0) == 1.0
    assert 0.1 < right(1.0) < 0.6


def test_the_warm_start_learns_repeats_and_is_a_hugging_face_model(data: Path, tmp_path: Path) -> None:
    """Twelve steps: the loss falls, two runs give the same file, transformers and our tokenizer loader read it."""
    losses: list[float] = []
    for name in ("a", "b"):
        warm_start(
            data / "train.jsonl",
            tmp_path / name,
            steps=12,
            unsure_steps=2,
            on_step=lambda step, steps, loss: losses.append(loss),
        )
    assert losses[:12] == losses[12:]
    assert losses[11] < 0.8 * losses[0]
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert weights[0] == weights[1]
    loaded: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(tmp_path / "a")
    assert load_tokenizer(tmp_path / "a").encode("<|video_pad|>") == [loaded.config.video_token_id]


def test_the_jobs_frames_are_those_of_the_warm_start() -> None:
    """The model sees in GRPO what it was taught on: 4 frames of 84 x 84 pixels."""
    job = (HERE.parent / "jobs" / "shapes_host.yaml").read_text(encoding="utf-8")
    assert f"frames: {SPEC.frames}, max_pixels: {SPEC.max_pixels}" in job
