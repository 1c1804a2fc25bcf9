"""A model and videos for a run on one H200: Qwen2.5-VL's architecture at 0.2 B parameters, 12 videos of 4,096 tokens.

python benchmarks/h200/make.py       writes benchmarks/h200/{model,data}; weights are drawn from run.seed
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import av
import numpy as np

HERE = Path(__file__).resolve().parent
SMALL = HERE.parent.parent / "examples" / "shapes" / "model" / "config.json"
CLIPS, FRAMES, SIDE, SQUARE = 12, 32, 448, 60
QUESTION = "Which way does the square move?"


def main() -> None:
    """Everything anew."""
    (HERE / "data" / "clips").mkdir(parents=True, exist_ok=True)
    (HERE / "model").mkdir(exist_ok=True)
    (HERE / "model" / "config.json").write_text(json.dumps(config(), indent=1) + "\n", encoding="utf-8")
    drawing = random.Random(0)
    rows = [clip(i, drawing.choice([-8, 8])) for i in range(CLIPS)]
    (HERE / "data" / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")


def config() -> dict[str, Any]:
    """The example's config.json, made larger."""
    made = json.loads(SMALL.read_text(encoding="utf-8"))
    made |= {"dtype": "bfloat16", "tie_word_embeddings": False}
    made["text_config"] |= {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16384,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [8, 12, 12]},
    }
    made["vision_config"] |= {
        "depth": 6,
        "hidden_size": 640,
        "intermediate_size": 1720,
        "num_heads": 8,
        "out_hidden_size": 1024,
        "fullatt_block_indexes": [2, 5],
    }
    return made


def clip(number: int, step: int) -> dict[str, str]:
    """A square that moves `step` pixels a frame; its row of the data set."""
    name = f"clips/{number}.mp4"
    with av.open(str(HERE / "data" / name), "w") as out:
        stream: Any = out.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for frame in range(FRAMES):
            pixels = np.full((SIDE, SIDE, 3), 40 + 5 * number, np.uint8)
            left = (200 + step * frame) % (SIDE - SQUARE)
            pixels[180 : 180 + SQUARE, left : left + SQUARE] = (200, 60, 20)
            out.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        out.mux(stream.encode())
    return {"video": name, "question": QUESTION, "answer": "left" if step < 0 else "right"}


if __name__ == "__main__":
    main()
