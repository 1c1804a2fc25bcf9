"""A data set is checked whole before anything runs: every bad line is named, with its file and line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image
from test_video import ramp, write_video

from rollplex.backends.data.rows import read_rows
from rollplex.ir.errors import DataError


def jsonl(folder: Path, *lines: object) -> Path:
    file = folder / "train.jsonl"
    file.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines) + "\n", encoding="utf-8")
    return file


def test_rows_of_videos_images_and_text(tmp_path: Path) -> None:
    """Paths are relative to the file; other keys are kept for the reward; blank lines do not count."""
    write_video(tmp_path / "a.mp4", ramp(4))
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    rows = read_rows(
        jsonl(
            tmp_path,
            {"video": "a.mp4", "question": "way?", "answer": "left", "shape": "circle"},
            "",
            {"image": "a.png", "question": "colour?", "answer": "red"},
            {"question": "1 + 1", "answer": "2"},
        )
    )
    assert [r.id for r in rows] == ["train.jsonl:1", "train.jsonl:3", "train.jsonl:4"]
    assert rows[0].video == tmp_path / "a.mp4"
    assert rows[0].extra == {"shape": "circle"}
    assert rows[1].image == tmp_path / "a.png"
    assert (rows[2].video, rows[2].image, rows[2].answer) == (None, None, "2")


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    """Seven bad lines, one error."""
    (tmp_path / "bad.mp4").write_bytes(b"noise")
    Image.new("RGB", (30, 30)).save(tmp_path / "a.png")
    file = jsonl(
        tmp_path,
        "{not json",
        ["a list"],
        {"video": "gone.mp4", "question": "q", "answer": "a"},
        {"video": "bad.mp4", "question": "q", "answer": "a"},
        {"question": 3},
        {"video": "bad.mp4", "image": "a.png", "question": "q", "answer": "a"},
        {"video": 5, "question": "q", "answer": "a"},
        {"image": "a.png", "question": "fine", "answer": "fine", "response_lengths": [3, 1]},
        {"question": "q", "answer": "a", "response_lengths": [3, 0]},
    )
    with pytest.raises(DataError) as caught:
        read_rows(file)
    text = str(caught.value)
    for part in (
        "train.jsonl:1: not JSON:",
        "train.jsonl:2: not a JSON object",
        f"train.jsonl:3: video {tmp_path / 'gone.mp4'} does not exist",
        f"train.jsonl:4: {tmp_path / 'bad.mp4'}: the video cannot be read: Invalid data found",
        "train.jsonl:5: question is not a text",
        "train.jsonl:5: answer is missing",
        "train.jsonl:6: a row has a video or an image, not both",
        "train.jsonl:7: video is not a path",
        "train.jsonl:9: response_lengths is not a list of whole numbers from 1 on",
    ):
        assert part in text, part
    assert "train.jsonl:8" not in text


def test_an_empty_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    """Nothing to train on is a mistake, not a short run."""
    with pytest.raises(DataError, match=r"train\.jsonl: the data set is empty"):
        read_rows(jsonl(tmp_path, ""))
    with pytest.raises(DataError, match=r"none\.jsonl: cannot read the data set: No such file"):
        read_rows(tmp_path / "none.jsonl")


def test_a_flood_of_problems_is_cut(tmp_path: Path) -> None:
    """Fifty lines are enough to see what is wrong."""
    with pytest.raises(DataError, match="and 30 more problems"):
        read_rows(jsonl(tmp_path, *["{"] * 80))
