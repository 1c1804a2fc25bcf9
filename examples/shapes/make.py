"""Make a small video question set: a coloured shape moves across the frame; every answer can be checked by rule.

python examples/shapes/make.py OUT --videos 500 --heldout 60 --seed 0

OUT/train.jsonl  OUT/heldout.jsonl  OUT/clips/0000.mp4 ..   (mpeg4 files of 16 frames, 84 x 84 pixels, 8 a second)
{"video": "clips/0000.mp4", "question": "Which way does the shape move?", "answer": "left", "kind": "way"}
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from PIL import Image, ImageDraw

SIDE, FRAMES, RATE = 84, 16, 8
DRAWN_LARGER = 3  # frames are drawn three times as large and scaled down: smooth edges, motion by fractions of a pixel

COLOURS = {"red": (220, 50, 50), "green": (60, 190, 80), "blue": (70, 100, 240), "yellow": (240, 210, 60)}
SHAPES = ("ring", "square", "triangle")
WAYS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
QUESTIONS = {
    "way": ("Which way does the shape move?", "In which direction does it go?"),
    "colour": ("What colour is the shape?", "Which colour does it have?"),
    "shape": ("What shape is it?", "Which shape is moving?"),
}


@dataclass(frozen=True)
class Scene:
    """One video: what moves, where it starts (the middle of its path, in pixels), how far and how large."""

    shape: str
    colour: str
    way: str
    middle: tuple[float, float]
    distance: float
    radius: float
    background: int

    def answer(self, kind: str) -> str:
        """The one right answer to a kind of question."""
        return {"way": self.way, "colour": self.colour, "shape": self.shape}[kind]


def random_scene(rng: random.Random) -> Scene:
    """A scene whose path stays within the frame."""
    radius, distance = rng.uniform(10, 14), rng.uniform(40, 54)
    dx, dy = WAYS[way := rng.choice(list(WAYS))]
    room_x, room_y = (SIDE / 2 - radius - abs(d) * distance / 2 - 1 for d in (dx, dy))
    middle = (SIDE / 2 + rng.uniform(-1, 1) * room_x, SIDE / 2 + rng.uniform(-1, 1) * room_y)
    return Scene(
        rng.choice(SHAPES), rng.choice(list(COLOURS)), way, middle, distance, radius, background=rng.randint(10, 60)
    )


def render(scene: Scene) -> Iterator[np.ndarray]:
    """Frames [84, 84, 3] uint8."""
    dx, dy = WAYS[scene.way]
    for i in range(FRAMES):
        along = (i / (FRAMES - 1) - 0.5) * scene.distance
        yield _draw(scene, scene.middle[0] + dx * along, scene.middle[1] + dy * along)


def write_video(path: Path, scene: Scene) -> None:
    """An mp4 file; FFmpeg's own mpeg4 encoder is in every build of PyAV."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=RATE)
        stream.width = stream.height = SIDE
        stream.pix_fmt = "yuv420p"
        stream.bit_rate = 800_000
        for image in render(scene):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def make(out: Path, videos: int, heldout: int, seed: int) -> tuple[Path, Path]:
    """Write `videos` + `heldout` clips and the two JSONL files, one row a kind of question; the same for one seed."""
    rng = random.Random(seed)
    (out / "clips").mkdir(parents=True, exist_ok=True)
    rows: list[list[dict[str, str]]] = []
    for i in range(videos + heldout):
        scene, name = random_scene(rng), f"clips/{i:04d}.mp4"
        write_video(out / name, scene)
        rows.append(
            [
                {"video": name, "question": rng.choice(asked), "answer": scene.answer(kind), "kind": kind}
                for kind, asked in QUESTIONS.items()
            ]
        )
    files = out / "train.jsonl", out / "heldout.jsonl"
    for file, part in zip(files, (rows[:videos], rows[videos:]), strict=True):
        lines = [json.dumps(row) for clip in part for row in clip]
        rng.shuffle(lines)
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


def _draw(scene: Scene, x: float, y: float) -> np.ndarray:
    k, r = DRAWN_LARGER, scene.radius
    image = Image.new("RGB", (SIDE * k, SIDE * k), (scene.background,) * 3)
    draw = ImageDraw.Draw(image)
    box = [(x - r) * k, (y - r) * k, (x + r) * k, (y + r) * k]
    if scene.shape == "ring":
        draw.ellipse(box, outline=COLOURS[scene.colour], width=round(0.4 * r * k))
    elif scene.shape == "square":
        draw.rectangle(box, fill=COLOURS[scene.colour])
    else:
        draw.polygon([x * k, box[1], box[2], box[3], box[0], box[3]], fill=COLOURS[scene.colour])
    return np.asarray(image.resize((SIDE, SIDE), Image.Resampling.BOX))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--videos", type=int, default=500)
    parser.add_argument("--heldout", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    train, heldout = make(args.out, args.videos, args.heldout, args.seed)
    print(f"{args.videos + args.heldout} videos, questions in {train} and {heldout}")


if __name__ == "__main__":
    main()
