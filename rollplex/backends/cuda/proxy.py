"""What stands for a model while a GPU is measured: its layers in plain torch operators, at the shapes of one rank.

decode   hidden [batch, h]   ->  norm, QKV, rotary, one token into the cache, attention over it, o, norm, gate/up, down
prefix   hidden [tokens, h]  ->  the same, attention causal over the tokens themselves
ranks    behind o and down their parts are summed (peers.py); with stretches of tokens gathered in front of QKV, gate/up
ring     layer 0 1 2 .. 11 0 1 2 ..       as many layers have weights, keys and values of their own as there is room for

It is honest about kernels and bytes, not about an engine: nothing is scheduled or sampled, the responses of a group
share no pages, a chunk attends to itself alone, no vision tower runs, and logits stay with the rank that has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from rollplex.backends.cuda.peers import Alone, Ranks
from rollplex.ir.calibration import Shape

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
VOCAB_MULTIPLE = 64
LEAST_LAYERS = 2
"""A ring of fewer layers would find its weights in the cache of the GPU."""


@dataclass(frozen=True)
class RankShape:
    """Sizes that one rank of `tp` computes with."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: Shape, tp: int) -> RankShape:
        """A rank's part of a model: KV heads are repeated where there are more ranks."""
        rows = -(-shape.vocab // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return cls(
            layers=shape.layers,
            hidden=shape.hidden,
            heads=shape.heads // tp,
            kv_heads=max(1, shape.kv_heads // tp),
            head_dim=shape.head_dim,
            ffn=shape.ffn // tp,
            vocab=rows // tp,
            dtype=DTYPES[shape.dtype],
        )

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of one layer's weights."""
        own, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "qkv": (own + 2 * kv, self.hidden),
            "o": (self.hidden, own),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }

    @property
    def layer_elements(self) -> int:
        """Weights of one layer."""
        return sum(rows * columns for rows, columns in self.linears.values())

    @property
    def layer_flops(self) -> int:
        """FLOPs of one token in one layer's linears."""
        return 2 * self.layer_elements

    @property
    def token_elements(self) -> int:
        """Elements of one token's keys and values in one layer."""
        return 2 * self.kv_heads * self.head_dim

    def attention_flops(self, tokens: int) -> int:
        """FLOPs of one layer's causal attention over so many tokens."""
        return 4 * self.heads * self.head_dim * tokens * tokens // 2


class Proxy:
    """The layers of a rank on a device, in a ring of about `room` bytes; with the head where it is `decoding`."""

    def __init__(
        self,
        shape: RankShape,
        device: torch.device,
        room: float,
        decoding: bool = False,
        exchange: Ranks | None = None,
    ) -> None:
        self.shape, self.device, self.exchange = shape, device, exchange or Alone()
        layer = shape.layer_elements * shape.dtype.itemsize
        self.ring = ring(shape.layers, layer, room)
        self.weights = [
            {name: self._random(rows, columns) for name, (rows, columns) in shape.linears.items()}
            for _ in range(self.ring)
        ]
        self.head = self._random(shape.vocab, shape.hidden) if decoding else None
        self.norm = torch.ones(shape.hidden, dtype=shape.dtype, device=device)

    def _random(self, *size: int) -> Tensor:
        return torch.randn(size, dtype=self.shape.dtype, device=self.device) / size[-1] ** 0.5

    def hidden(self, tokens: int) -> Tensor:
        """What goes in: [tokens, hidden]."""
        return self._random(tokens, self.shape.hidden)

    def cache(self, batch: int, context: int, room: float) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [batch, kv_heads, context, head_dim] of as many layers as there is room for."""
        s = self.shape
        count = ring(s.layers, batch * context * s.token_elements * s.dtype.itemsize, room)
        size = (batch, s.kv_heads, context, s.head_dim)
        return [(self._random(*size), self._random(*size)) for _ in range(count)]

    @torch.no_grad()
    def decode(self, hidden: Tensor, cache: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One token of each response, written behind what the cache holds: logits [batch, vocab]."""
        assert self.head is not None, "a proxy that decodes has a head"
        rotary = self._rotary(1)
        for layer in range(self.shape.layers):
            keys, values = cache[layer % len(cache)]
            q, k, v = self._heads(layer, self._all_tokens(hidden)[:, None], rotary)  # [batch, heads, 1, head_dim]
            keys[:, :, -1:], values[:, :, -1:] = k, v
            found = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
            hidden = self._behind(layer, hidden, found.transpose(1, 2).flatten(1))
        return F.linear(self._normed(hidden), self.head)

    @torch.no_grad()
    def prefix(self, hidden: Tensor) -> Tensor:
        """All tokens of a chunk through all layers, each seeing those before it; in and out this rank's [t, hidden]."""
        rotary = self._rotary(len(hidden) * self.exchange.pieces)
        for layer in range(self.shape.layers):
            q, k, v = self._heads(layer, self._all_tokens(hidden)[None], rotary)  # [1, heads, tokens, head_dim]
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            hidden = self._behind(layer, hidden, found[0].transpose(0, 1).flatten(1))
        return hidden

    def inputs(self, tokens: int) -> dict[str, Tensor]:
        """What goes into each of a layer's linears."""
        return {name: self._random(tokens, columns) for name, (_, columns) in self.shape.linears.items()}

    def linears(self, layer: int, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """One layer's linears alone, for their rate."""
        return [F.linear(inputs[name], weight) for name, weight in self.weights[layer % self.ring].items()]

    def _heads(self, layer: int, hidden: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [b, heads, t, head_dim] of normed hidden states [b, t, h]."""
        s = self.shape
        made = F.linear(hidden, self.weights[layer % self.ring]["qkv"])
        made = made.unflatten(-1, (s.heads + 2 * s.kv_heads, s.head_dim)).transpose(1, 2)
        q, k, v = made.split((s.heads, s.kv_heads, s.kv_heads), 1)
        return _rotated(q, *rotary), _rotated(k, *rotary), v

    def _behind(self, layer: int, hidden: Tensor, attended: Tensor) -> Tensor:
        """What a layer does with its attention's output [t, heads * head_dim]."""
        weights = self.weights[layer % self.ring]
        hidden = hidden + self.exchange.summed(F.linear(attended, weights["o"]))
        gate, up = F.linear(self._all_tokens(hidden), weights["gate_up"]).chunk(2, -1)
        return hidden + self.exchange.summed(F.linear(F.silu(gate) * up, weights["down"]))

    def _all_tokens(self, hidden: Tensor) -> Tensor:
        """What a cut linear reads."""
        return self.exchange.gathered(self._normed(hidden))

    def _normed(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, (self.shape.hidden,), self.norm)

    def _rotary(self, tokens: int) -> tuple[Tensor, Tensor]:
        angles = torch.arange(tokens, device=self.device)[:, None] / 1e4 ** torch.linspace(
            0, 1, self.shape.head_dim // 2, device=self.device
        )
        angles = torch.cat([angles, angles], -1)
        return angles.cos().to(self.shape.dtype), angles.sin().to(self.shape.dtype)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


def ring(layers: int, layer_bytes: float, room: float) -> int:
    """How many layers have memory of their own: all, or as many as fit, two at least."""
    return max(min(layers, LEAST_LAYERS), min(layers, int(room // layer_bytes)))
