"""A data set: a JSONL file of questions with answers, about a video or an image or nothing.

{"video": "clips/0001.mp4", "question": "Which way does the circle move?", "answer": "left"}

A row may say how long its responses are, for benchmarks: {.., "response_lengths": [75, 512]} ends the first after 75
tokens and the second after 512, whatever is sampled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rollplex.backends.data.video import decode_image, decode_video
from rollplex.ir.errors import DataError, Problem

MOST_PROBLEMS = 50
LENGTHS = "response_lengths"


@dataclass(frozen=True)
class Row:
    """One question; `id` is `train.jsonl:12`, `extra` holds the row's other keys for the reward.

    `response_lengths` are tokens of each response; empty: responses end where the model ends them.
    """

    id: str
    question: str
    answer: str
    video: Path | None = None
    image: Path | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def response_lengths(self) -> tuple[int, ...]:
        return tuple(self.extra.get(LENGTHS, ()))


def read_rows(path: str | Path) -> list[Row]:
    """Every row of a JSONL file, checked, its media opened once; DataError lists all problems with file:line."""
    file = Path(path)
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as err:
        reason = getattr(err, "strerror", None) or str(err)
        raise DataError(f"cannot read the data set: {reason}", where=file) from None
    rows: list[Row] = []
    problems: list[Problem] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            found = _parse(line, f"{file.name}:{number}", file.parent)
            problems += [p for p in found if isinstance(p, Problem)]
            rows += [r for r in found if isinstance(r, Row)]
    if problems:
        raise DataError(*_shorten(problems))
    if not rows:
        raise DataError("the data set is empty", where=file, hint="one JSON object a line: video, question, answer")
    return rows


def _parse(line: str, where: str, folder: Path) -> list[Row | Problem]:
    """Either one row, or everything that is wrong with the line."""
    try:
        data = json.loads(line)
    except ValueError as err:
        return [Problem(f"not JSON: {err}", where)]
    if not isinstance(data, dict):
        return [Problem("not a JSON object", where, 'write {"video": .., "question": .., "answer": ..}')]
    problems = list(_problems(data, where, folder))
    if problems:
        return [*problems]
    media = {kind: folder / data[kind] for kind in ("video", "image") if kind in data}
    extra = {k: v for k, v in data.items() if k not in ("video", "image", "question", "answer")}
    return [Row(where, data["question"], data["answer"], **media, extra=extra)]


def _problems(data: dict[str, Any], where: str, folder: Path) -> Iterator[Problem]:
    for key in ("question", "answer"):
        if not isinstance(data.get(key), str) or not data[key]:
            yield Problem(f"{key} is missing" if key not in data else f"{key} is not a text", where)
    if LENGTHS in data and not _lengths(data[LENGTHS]):
        yield Problem(f"{LENGTHS} is not a list of whole numbers from 1 on", where, "leave it out, or write [75, 512]")
    media = [kind for kind in ("video", "image") if kind in data]
    if len(media) == 2:
        yield Problem("a row has a video or an image, not both", where)
    for kind in media:
        if not isinstance(data[kind], str):
            yield Problem(f"{kind} is not a path", where)
        elif reason := _unreadable(kind, folder / data[kind]):
            yield Problem(reason, where)


def _lengths(found: Any) -> bool:
    return isinstance(found, list) and bool(found) and all(type(n) is int and n > 0 for n in found)


@cache
def _unreadable(kind: str, path: Path) -> str:
    """Why a media file cannot be used, empty if it can; one frame is decoded. Many rows may share a file."""
    if not path.is_file():
        return f"{kind} {path} does not exist"
    try:
        decode_video(path, 1) if kind == "video" else decode_image(path)
    except DataError as err:
        return f"{path}: {err.problems[0].what}"
    return ""


def _shorten(problems: list[Problem]) -> list[Problem]:
    if len(problems) <= MOST_PROBLEMS:
        return problems
    return [*problems[:MOST_PROBLEMS], Problem(f"and {len(problems) - MOST_PROBLEMS} more problems")]
