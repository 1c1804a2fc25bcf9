"""Layout by bytes: an independent model of both engines' row orders says which claims of the layout pass hold.

Every weight is an array of different numbers. The rollout engine's shards are laid out as a class of the plan claims,
each training rank takes its own part by offset alone, and what either engine then reads is compared, number by number,
with the logical weight cut the way that engine cuts it.

    snapshot of rollout rank R   [ slab of rank Rq | slab of rank Rq + 1 | .. ]
    trainer, rank Rq + j         the j-th slab, contiguous
    rollout engine, rank R       all of it, re-indexed as engines.md section 3 has it
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from rollplex.backends.megatron.facts import FACTS as MEGATRON
from rollplex.backends.vllm.facts import FACTS as VLLM
from rollplex.ir.spec import ModelSpec
from rollplex.passes.layout_options import Orders
from rollplex.passes.slabs import slabs

HEAD, HIDDEN = 2, 3


def spec(heads: int, kv_heads: int, ffn: int = 48) -> ModelSpec:
    return ModelSpec(
        name="small", family="qwen2", hidden=HIDDEN, layers=1, heads=heads, kv_heads=kv_heads, head_dim=HEAD, ffn=ffn,
        vocab=100, tied=True, qkv_bias=True, qk_norm=True,
    )  # fmt: skip


def numbered(part: int, rows: int, columns: int) -> np.ndarray:
    """A weight whose every element is different from all others, over all parts."""
    return part * 10**6 + np.arange(rows * columns).reshape(rows, columns)


class Weights:
    """Q, K, V of a model; a bias is a weight of one column, which follows its rows."""

    def __init__(self, model: ModelSpec, columns: int) -> None:
        self.model, self.n = model, model.heads // model.kv_heads
        self.q = numbered(1, model.heads * HEAD, columns)
        self.k, self.v = (numbered(p, model.kv_heads * HEAD, columns) for p in (2, 3))

    def megatron(self, tp: int, rank: int) -> np.ndarray:
        """All groups [Q_g.., K_g, V_g] one behind the other, cut evenly (attention.py, linear_qkv)."""
        step = self.n * HEAD
        parts = ((self.q, step), (self.k, HEAD), (self.v, HEAD))
        groups = [w[g * rows : (g + 1) * rows] for g in range(self.model.kv_heads) for w, rows in parts]
        return np.split(np.concatenate(groups), tp)[rank]

    def vllm(self, tp: int, rank: int) -> np.ndarray:
        """[Q_R; K_R; V_R]; with more ranks than KV heads, each head on several (linear.py, QKVParallelLinear)."""
        q = np.split(self.q, tp)[rank]
        if tp <= self.model.kv_heads:
            return np.concatenate([q, np.split(self.k, tp)[rank], np.split(self.v, tp)[rank]])
        head = rank // (tp // self.model.kv_heads)
        return np.concatenate([q, *(w[head * HEAD : (head + 1) * HEAD] for w in (self.k, self.v))])


def orders(model: ModelSpec, name: str, tp_t: int, tp_r: int) -> Orders:
    return Orders(
        tuple(MEGATRON.rows(model, name, tp_t, g) for g in range(tp_t)),
        tuple(VLLM.rows(model, name, tp_r, r) for r in range(tp_r)),
    )


DEGREES = [(t, r) for t, r in itertools.product((1, 2, 4, 8), repeat=2) if t % r == 0]
HEADS = [(8, 8), (16, 8), (16, 4), (8, 2), (8, 1)]
EVEN = [(h, t) for h, t in itertools.product(HEADS, DEGREES) if (h[0] + 2 * h[1]) * HEAD % t[0] == 0]
"""Megatron cuts all rows of QKV evenly, or not at all."""


@pytest.mark.parametrize(("heads", "degrees"), EVEN)
@pytest.mark.parametrize("columns", [HIDDEN, 1])
def test_qkv_by_bytes(heads: tuple[int, int], degrees: tuple[int, int], columns: int) -> None:
    """Aliased where the orders agree, re-indexed where rows suffice, and otherwise no slab has what a rank needs."""
    model, (tp_t, tp_r) = spec(*heads), degrees
    weights, q = Weights(model, columns), tp_t // tp_r
    claims = orders(model, "qkv", tp_t, tp_r)
    for r in range(tp_r):
        shared = np.concatenate([weights.megatron(tp_t, r * q + j) for j in range(q)])
        wanted = weights.vllm(tp_r, r)
        if claims.joinable:
            assert np.array_equal(reindexed(shared, model, tp_r), wanted)
        else:
            assert not set(wanted.ravel()) <= set(shared.ravel())
    alias = all(contained(weights.megatron(tp_t, g), weights.vllm(tp_r, g // q)) for g in range(tp_t))
    assert alias == (claims.slabs == 1)


def reindexed(shard: np.ndarray, model: ModelSpec, tp: int) -> np.ndarray:
    """y.view(T, G, n + 2, hd): q = [:, :, :n], k = [:, :, n], v = [:, :, n + 1]; here on rows, not activations."""
    n, groups = model.heads // model.kv_heads, model.kv_heads // tp
    y = shard.reshape(groups, n + 2, HEAD, -1)
    return np.concatenate([part.reshape(-1, shard.shape[1]) for part in (y[:, :n], y[:, n], y[:, n + 1])])


def contained(inner: np.ndarray, outer: np.ndarray) -> bool:
    """Whether `inner` is a run of rows of `outer`: looked for at every offset."""
    starts = range(len(outer) - len(inner) + 1)
    return any(np.array_equal(outer[s : s + len(inner)], inner) for s in starts)


@pytest.mark.parametrize(("tp_t", "tp_r"), DEGREES)
def test_gate_and_up_by_bytes(tp_t: int, tp_r: int) -> None:
    """Interleaved, a training rank has one slab and the activation's view is in natural order; stacked, it has two."""
    model, q = spec(8, 8), tp_t // tp_r
    gate, up = numbered(1, model.ffn, HIDDEN), numbered(2, model.ffn, HIDDEN)
    f = model.ffn // tp_t
    claims = orders(model, "gate_up", tp_t, tp_r)
    for r in range(tp_r):
        own = [np.concatenate([np.split(w, tp_t)[r * q + j] for w in (gate, up)]) for j in range(q)]
        stacked = np.concatenate([np.split(w, tp_r)[r] for w in (gate, up)])
        viewed = np.concatenate(own).reshape(q, 2, f, HIDDEN)  # y.view(-1, 2 f): gate is [.., :f], up is [.., f:]
        assert np.array_equal(np.concatenate([viewed[:, i].reshape(-1, HIDDEN) for i in (0, 1)]), stacked)
        for j, mine in enumerate(own):
            runs = slabs(claims.train[r * q + j], claims.rollout[r])
            assert runs is not None
            assert np.array_equal(np.concatenate([stacked[s.start : s.stop] for s in runs]), mine)
            assert (len(runs) == 1) == contained(mine, stacked)


@pytest.mark.parametrize(("tp_t", "tp_r"), DEGREES)
def test_row_parallel_weights_by_bytes(tp_t: int, tp_r: int) -> None:
    """[O, I] cut along I: no shard is one range of another's bytes when q > 1; stored [I, O], every shard is."""
    q, weight = tp_t // tp_r, numbered(1, 5, 48)
    for g in range(tp_t):
        rollout, mine = np.split(weight, tp_r, axis=1)[g // q], np.split(weight, tp_t, axis=1)[g]
        stored = np.ascontiguousarray(rollout.T)
        rows = len(stored) // q
        slab = stored[g % q * rows : (g % q + 1) * rows]
        assert slab.flags["C_CONTIGUOUS"]
        assert np.array_equal(slab.T, mine)
        assert np.array_equal(stored.T, rollout)
        flat, want = rollout.ravel(), mine.ravel()
        one_range = any(np.array_equal(flat[s : s + len(want)], want) for s in range(len(flat) - len(want) + 1))
        assert one_range == (q == 1)


@pytest.mark.parametrize(("tp_t", "tp_r"), DEGREES)
def test_padded_vocabulary_by_bytes(tp_t: int, tp_r: int) -> None:
    """100 rows padded to 128 in both engines: training shards nest; padded for each engine alone, they would not."""
    model, q = spec(8, 8), tp_t // tp_r
    table = numbered(1, model.padded_vocab(tp_t), HIDDEN)
    assert len(table) == 128
    for g in range(tp_t):
        mine, shard = np.split(table, tp_t)[g], np.split(table, tp_r)[g // q]
        assert np.array_equal(shard[g % q * len(mine) : (g % q + 1) * len(mine)], mine)
