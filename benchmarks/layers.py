"""What a layer takes of the CPU that launches it: Megatron's own forward and ours, on layers with little to compute.

python -m benchmarks.layers         of Qwen2.5-VL's depth, 36 layers, CPU milliseconds of this process, least of 30 runs

    score      log-probabilities of four responses of four tokens over a prefix, without a backward
    train      the same, and its backward
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from benchmarks.page import measured_with, table
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.megatron import memory
from rollplex.backends.megatron.layers import Attention, Layer
from rollplex.backends.megatron.linears import Column, Row
from rollplex.backends.megatron.names import parameters
from rollplex.backends.megatron.rank import PARTS, MegatronModel
from rollplex.backends.training.boundary import boundary_leaf
from rollplex.ir.models import spec_from_config
from rollplex.ir.spec import Part

# Our classes, and those of Megatron's whose forward they have their own in place of.
MEGATRONS: dict[type, type] = {
    Layer: TransformerLayer,
    Attention: SelfAttention,
    Column: ColumnParallelLinear,
    Row: RowParallelLinear,
}
LAYERS, TIMES, PROMPT = 36, 30, 16
CONFIG: dict[str, Any] = {
    "model_type": "qwen2_5_vl",
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "tie_word_embeddings": True,
    "text_config": {
        "model_type": "qwen2_5_vl_text",
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
    },
    "vision_config": {
        "model_type": "qwen2_5_vl_vision",
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [0],
    },
}


def main() -> None:
    """Print both, and how many times ours goes into Megatron's."""
    torch.set_num_threads(1)
    work = Work()
    ours = [least_ms(task) for task in (work.score, work.train)]
    with megatrons():
        theirs = [least_ms(task) for task in (work.score, work.train)]
    rows = [
        (name, f"{own:.1f}", f"{other:.1f}", f"{other / own:.2f}x")
        for name, own, other in zip(("score", "train"), ours, theirs, strict=True)
    ]
    print(measured_with("torch", "megatron-core"), "", sep="\n")
    print("\n".join(table((f"{LAYERS} layers", "ours, ms", "Megatron's, ms", "ratio"), rows)))


class Work:
    """A model of one rank with weights drawn, and a prefix."""

    def __init__(self) -> None:
        spec = spec_from_config(CONFIG, "small")
        order = parameters(spec, 1, 0)
        pages: dict[Part, Tensor] = {
            part: torch.randn(memory.numel([p for p in order if p.part == part])).mul(0.02) for part in PARTS
        }
        self.rank = MegatronModel(spec, torch.float32, pages)
        positions = torch.arange(PROMPT)
        prompt = Prompt("row", "question", "answer", positions, positions.expand(3, -1), PROMPT)
        slot = torch.zeros(self.rank.boundary_shape(PROMPT))
        self.prefix = self.rank.prefix(prompt, slot, attached=False)
        self.responses = [torch.arange(4)] * 4

    def score(self) -> None:
        """Without a backward."""
        with torch.no_grad():
            self.rank.logprobs(self.prefix, self.prefix.kv, self.responses, 1.0)

    def train(self) -> None:
        """With its backward, down to the prefix."""
        self.rank.logprobs(self.prefix, boundary_leaf(self.prefix.kv), self.responses, 1.0).sum().backward()


@contextmanager
def megatrons() -> Iterator[None]:
    """Within the block layers run as Megatron's own."""
    kept = {own: vars(own)["forward"] for own in MEGATRONS}
    for own, theirs in MEGATRONS.items():
        own.forward = theirs.forward  # pyright: ignore[reportAttributeAccessIssue]
    own_layer = Layer.forward
    Layer.forward = lambda *args, **kwargs: own_layer(*args, **kwargs)[0]
    try:
        yield
    finally:
        for own, forward in kept.items():
            own.forward = forward  # pyright: ignore[reportAttributeAccessIssue]


def least_ms(task: Callable[[], None]) -> float:
    """CPU milliseconds of this process."""
    found = []
    for _ in range(TIMES):
        began = time.process_time()
        task()
        found.append(time.process_time() - began)
    return min(found) * 1e3


if __name__ == "__main__":
    main()
