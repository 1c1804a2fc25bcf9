"""Models, videos and texts for runs on one H200: Qwen2.5-VL's architecture, weights drawn from run.seed.

python -m benchmarks.h200.make [NAME ..]       writes benchmarks/h200/{small,3b,7b} and benchmarks/h200/data, or some

    small   0.2 B parameters                                clips    12 videos of 32 frames, 4,096 tokens each
    3b      Qwen2.5-VL-3B's dimensions                      long     12 videos of 46 frames, 5,888 tokens each
    7b      Qwen2.5-VL-7B's dimensions                      text     12 questions of 6,000 tokens (a byte each)
    long_mixed, text_mixed: the same, with responses of log-normal lengths from 32 to 512 tokens, median 256, 8 a prompt
"""

from __future__ import annotations

import json
import math
import random
import string
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent.parent / "examples" / "shapes" / "model" / "config.json"
ROWS, SIDE, SQUARE, TEXT_TOKENS = 12, 448, 60, 6000
STEP, GROUP, LEAST, MOST = 4, 8, 32, 512
FRAMES = {"clips": 32, "long": 46}
MIXED = "_mixed"
QUESTION = "Which way does the square move?"
TOWER = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "small": {
        "text": {
            "vocab_size": 32768,
            "hidden_size": 1024,
            "intermediate_size": 2816,
            "num_hidden_layers": 8,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]},
        },
        "vision": {
            "depth": 6,
            "hidden_size": 640,
            "intermediate_size": 1720,
            "num_heads": 8,
            "fullatt_block_indexes": [2, 5],
        },
    },
    "3b": {
        "text": {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        "vision": TOWER,
    },
    "7b": {
        "text": {
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [16, 24, 24]},
        },
        "vision": TOWER,
    },
}


def main() -> None:
    """Everything anew, or what is named."""
    kinds = [*FRAMES, "text"]
    sets = [*kinds, *(f"{kind}{MIXED}" for kind in kinds)]
    for name in sys.argv[1:] or [*SIZES, *sets]:
        if name not in (*SIZES, *sets):
            raise SystemExit(f"there is no {name} to make: {', '.join((*SIZES, *sets))}")
        (model if name in SIZES else data)(name)


def model(size: str) -> None:
    """The directory of a model: its config.json."""
    (HERE / size).mkdir(exist_ok=True)
    (HERE / size / "config.json").write_text(json.dumps(config(size), indent=1) + "\n", encoding="utf-8")


def data(name: str) -> None:
    """A data set, with its videos."""
    kind = name.removesuffix(MIXED)
    (HERE / "data").mkdir(exist_ok=True)
    rows = list(texts() if kind == "text" else videos(kind))
    found = rows if name == kind else mixed(rows[:STEP])
    (HERE / "data" / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found), encoding="utf-8")


def config(size: str) -> dict[str, Any]:
    """The example's config.json, made larger."""
    made = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    made |= {"dtype": "bfloat16", "tie_word_embeddings": size == "3b"}
    text, vision = SIZES[size]["text"], SIZES[size]["vision"]
    made["text_config"] |= text | {"max_position_embeddings": 16384}
    made["vision_config"] |= vision | {"out_hidden_size": text["hidden_size"]}
    return made


def mixed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As many rows as a step takes, with a length for each response; one of them has the most tokens."""
    drawing = random.Random(7)
    lengths = [max(LEAST, min(MOST, int(math.exp(drawing.gauss(math.log(256), 0.7))))) for _ in range(STEP * GROUP)]
    lengths[drawing.randrange(STEP * GROUP)] = MOST
    own = [lengths[i : i + GROUP] for i in range(0, STEP * GROUP, GROUP)]
    return [row | {"response_lengths": own[number]} for number, row in enumerate(rows)]


def texts() -> Iterator[dict[str, Any]]:
    """Letters, digits and blanks: the byte tokenizer makes a token of each."""
    drawing = random.Random(1)
    for _ in range(ROWS):
        yield {
            "question": "".join(drawing.choices(string.ascii_letters + string.digits + " ", k=TEXT_TOKENS)),
            "answer": "left",
        }


def videos(kind: str) -> Iterator[dict[str, Any]]:
    """A square that moves a few pixels a frame, one way or the other."""
    drawing = random.Random(0)
    (HERE / "data" / kind).mkdir(exist_ok=True, parents=True)
    for number in range(ROWS):
        name, step = f"{kind}/{number}.mp4", drawing.choice([-8, 8])
        write(HERE / "data" / name, number, step, FRAMES[kind])
        yield {"video": name, "question": QUESTION, "answer": "left" if step < 0 else "right"}


def write(path: Path, number: int, step: int, frames: int) -> None:
    """One clip."""
    import av  # texts are made without it

    with av.open(str(path), "w") as out:
        stream: Any = out.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for frame in range(frames):
            pixels = np.full((SIDE, SIDE, 3), 40 + 5 * number, np.uint8)
            left = (200 + step * frame) % (SIDE - SQUARE)
            pixels[180 : 180 + SQUARE, left : left + SQUARE] = (200, 60, 20)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        out.mux(stream.encode())


if __name__ == "__main__":
    main()
