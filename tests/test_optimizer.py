"""Chunked Adam is Adam: to the bit, for any chunks, dtype and decay; norm and clipping do not depend on the chunks.

torch.optim on whole parameters     |  p0  |     p1      | p2 |
ours, the same numbers laid flat    |--0--|--1--|--2--|--3--|4|
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.ir.errors import RunError
from rollplex.runtime import optimizer
from rollplex.runtime.optimizer import (
    NORM_BLOCK,
    AdamConfig,
    ChunkedAdam,
    FlatState,
    Slab,
    Workspace,
    allocate_workspace,
    blocks,
    clip_scale,
    flat_layout,
    global_norm,
    overlaps,
    square,
    state_dtype,
    sum_squares,
)

torch.set_num_threads(1)
CONFIG = AdamConfig(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)

sizes_strategy = st.lists(st.integers(0, 70), min_size=1, max_size=6).filter(lambda sizes: sum(sizes) > 0)


def named(sizes: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"p{i}", size) for i, size in enumerate(sizes)]


def fresh_state(numel: int, dtype: torch.dtype, grad_dtype: torch.dtype | None = None) -> FlatState:
    master = torch.randn(numel, generator=torch.Generator().manual_seed(numel), dtype=dtype)
    zeros = torch.zeros(numel, dtype=dtype)
    return FlatState(master, zeros, zeros.clone(), torch.zeros(numel, dtype=grad_dtype or dtype))


def fill_grad(state: FlatState, step: int) -> None:
    state.grad.copy_(torch.randn(state.grad.shape, generator=torch.Generator().manual_seed(step), dtype=torch.float64))


def reference(
    slabs: Sequence[Slab], start: torch.Tensor, grads: Sequence[torch.Tensor], config: AdamConfig
) -> list[torch.Tensor]:
    """torch.optim on unchunked parameters: master, exp_avg, exp_avg_sq, each laid flat."""
    params = [torch.nn.Parameter(start[slab.offset : slab.stop].clone()) for slab in slabs]
    groups = [
        {"params": [p for p, slab in zip(params, slabs, strict=True) if slab.decay is decay], "weight_decay": amount}
        for decay, amount in ((True, config.weight_decay), (False, 0.0))
    ]
    kind = torch.optim.AdamW if config.decoupled else torch.optim.Adam
    optimizer = kind(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps, foreach=False
    )
    for grad in grads:
        for param, slab in zip(params, slabs, strict=True):
            param.grad = grad[slab.offset : slab.stop].clone()
        optimizer.step()
    states = [optimizer.state[param] for param in params]
    moments = [torch.cat([state[key] for state in states]) for key in ("exp_avg", "exp_avg_sq")]
    return [torch.cat([param.detach() for param in params]), *moments]


def chunks_of(numel: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, numel)) for start in range(0, numel, size)]


@given(
    sizes=sizes_strategy,
    size=st.integers(1, 400),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    decoupled=st.booleans(),
    in_place=st.booleans(),
    undecayed=st.sets(st.integers(0, 5)),
)
@settings(max_examples=80, deadline=None)
def test_chunked_adam_is_torch_adam_to_the_bit(
    sizes: list[int], size: int, dtype: torch.dtype, decoupled: bool, in_place: bool, undecayed: set[int]
) -> None:
    config = AdamConfig(CONFIG.lr, CONFIG.betas, CONFIG.eps, CONFIG.weight_decay, decoupled)
    slabs = flat_layout(named(sizes), decay=lambda name: int(name[1:]) not in undecayed)
    state = fresh_state(sum(sizes), dtype)
    start, grads = state.master.clone(), []
    chunked = ChunkedAdam(config, slabs, state, {})
    for step in (1, 2, 3):
        fill_grad(state, step)
        grads.append(state.grad.clone())
        chunked.step(chunks_of(sum(sizes), size), step, workspace=None if in_place else allocate_workspace(size, dtype))
    expected = reference(slabs, start, grads, config)
    for got, want in zip((state.master, state.exp_avg, state.exp_avg_sq), expected, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1_000_003, 262_144, 99_991])
def test_large_and_odd_chunks_to_the_bit(dtype: torch.dtype, size: int) -> None:
    """Beyond torch's grain size, with tails that end inside a vector register."""
    slabs = flat_layout(named([700_001, 300_002]))
    state = fresh_state(1_000_003, dtype)
    start = state.master.clone()
    fill_grad(state, 1)
    ChunkedAdam(CONFIG, slabs, state, {}).step(chunks_of(1_000_003, size), 1, workspace=allocate_workspace(size, dtype))
    assert torch.equal(state.master, reference(slabs, start, [state.grad], CONFIG)[0])


@given(sizes=sizes_strategy, size=st.integers(1, 400))
@settings(max_examples=40, deadline=None)
def test_the_snapshot_is_the_cast_master(sizes: list[int], size: int) -> None:
    slabs = flat_layout(named(sizes))
    state = fresh_state(sum(sizes), torch.float32, torch.bfloat16)
    snapshot = {slab.name: torch.zeros(slab.numel, dtype=torch.bfloat16) for slab in slabs}
    fill_grad(state, 1)
    ChunkedAdam(CONFIG, slabs, state, snapshot).step(
        chunks_of(sum(sizes), size), 1, 0.5, allocate_workspace(size, torch.float32)
    )
    for slab in slabs:
        assert torch.equal(snapshot[slab.name], state.master[slab.offset : slab.stop].bfloat16())


def test_a_snapshot_view_of_any_shape_and_a_missing_one() -> None:
    """Parameters that require grad, in two dimensions; p1 is kept as master only."""
    slabs = flat_layout([("p0", 6), ("p1", 3)])
    state = fresh_state(9, torch.float32)
    param = torch.nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    adam = ChunkedAdam(CONFIG, slabs, state, {"p0": param})
    adam.publish(state.master, 0, 9)  # the first snapshot, before any update
    assert torch.equal(param.detach().view(-1), state.master[:6].bfloat16())
    before = param.detach().clone()
    fill_grad(state, 1)
    adam.step([(0, 5), (5, 9)], 1)
    assert not torch.equal(param.detach(), before)
    assert torch.equal(param.detach().view(-1), state.master[:6].bfloat16())


def test_a_chunk_touches_nothing_outside_itself() -> None:
    """load | update | store of one chunk: the seam that lets neighbours run at the same time."""
    slabs = flat_layout(named([40, 60]))
    state = fresh_state(100, torch.float32)
    fill_grad(state, 1)
    snapshot = {slab.name: torch.zeros(slab.numel) for slab in slabs}
    adam = ChunkedAdam(CONFIG, slabs, state, snapshot)
    before = [part.clone() for part in (state.master, state.exp_avg, state.exp_avg_sq, state.grad)]
    work = adam.load(30, 50, 1.0, allocate_workspace(64, torch.float32))
    adam.update(work, 30, 50, 1)
    for part, old in zip((state.master, state.exp_avg, state.exp_avg_sq, state.grad), before, strict=True):
        assert torch.equal(part, old)  # nothing is written before `store`
    adam.store(work, 30, 50)
    outside = torch.ones(100, dtype=torch.bool)
    outside[30:50] = False
    assert torch.equal(state.master[outside], before[0][outside])
    assert (state.master[~outside] != before[0][~outside]).all()
    assert torch.cat([snapshot["p0"][:30], snapshot["p1"][10:]]).abs().sum() == 0
    assert torch.equal(torch.cat([snapshot["p0"][30:], snapshot["p1"][:10]]), state.master[30:50])


def test_a_chunk_is_two_calls_of_torchs_adam_however_often_decay_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six layers with a norm each: all that decays in one call, all norms in another, each tensor with its counter."""
    calls: list[tuple[float, list[int], list[float]]] = []

    def counted(params: list[torch.Tensor], *lists: list[torch.Tensor], **options: object) -> None:
        decay = options["weight_decay"]
        assert isinstance(decay, float)
        calls.append((decay, [p.numel() for p in params], [float(done) for done in lists[-1]]))

    monkeypatch.setattr(optimizer, "adam", counted)
    sizes = [(f"{i}.{part}", numel) for i in range(6) for part, numel in (("mlp", 10), ("norm", 3))]
    slabs = flat_layout(sizes, decay=lambda name: "norm" not in name)
    ChunkedAdam(CONFIG, slabs, fresh_state(78, torch.float32), {}).step([(5, 50)], 4)
    assert calls == [(0.1, [5, 10, 10, 10], [3.0] * 4), (0.0, [3, 3, 3, 1], [3.0] * 4)]


def test_what_a_gpu_counts_steps_with_is_torchs_fused_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are filled where they are read, views of one tensor; torch's fused kernel, on a host, to the bit."""
    made: list[torch.Size] = []
    full = torch.full

    def here(size: tuple[int, ...], value: float, device: torch.device) -> torch.Tensor:
        made.append(torch.Size(size))
        assert device.type == "cuda"
        return full(size, value)

    monkeypatch.setattr(torch, "full", here)
    counters = optimizer._counters(3, 6, torch.device("cuda", 0))
    own = [[torch.rand(5) + i for i in range(3)] for _ in range(4)]
    wanted = [[x.clone() for x in part] for part in own]
    for (params, grads, firsts, seconds), done in ((own, counters), (wanted, [torch.tensor(6.0) for _ in range(3)])):
        optimizer.adam(
            params, grads, firsts, seconds, [], done, foreach=False, fused=True, amsgrad=False, beta1=0.9, beta2=0.95,
            lr=1e-2, weight_decay=0.1, eps=1e-8, maximize=False, decoupled_weight_decay=True,
        )  # fmt: skip
    assert made == [(3,)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(own[0], wanted[0], strict=True))


def test_done_is_called_after_each_stored_chunk() -> None:
    state = fresh_state(10, torch.float32)
    fill_grad(state, 1)
    before, seen = state.master.clone(), []
    ChunkedAdam(CONFIG, flat_layout(named([10])), state, {}).step(
        [(0, 4), (4, 10)], 1, done=lambda start, stop: seen.append((start, stop, int((state.master != before).sum())))
    )
    assert seen == [(0, 4, 4), (4, 10, 10)]


@given(sizes=sizes_strategy, scale=st.floats(0.01, 1.0), size=st.integers(1, 100), in_place=st.booleans())
@settings(max_examples=30, deadline=None)
def test_clipping_scales_the_gradient_that_adam_sees(sizes: list[int], scale: float, size: int, in_place: bool) -> None:
    numel, slabs = sum(sizes), flat_layout(named(sizes))
    clipped, scaled = fresh_state(numel, torch.float32), fresh_state(numel, torch.float32)
    fill_grad(clipped, 1)
    scaled.grad.copy_(clipped.grad).mul_(scale)
    grad = clipped.grad.clone()
    workspace = None if in_place else allocate_workspace(size, torch.float32)
    ChunkedAdam(CONFIG, slabs, clipped, {}).step(chunks_of(numel, size), 1, scale, workspace)
    ChunkedAdam(CONFIG, slabs, scaled, {}).step([(0, numel)], 1)
    assert torch.equal(clipped.master, scaled.master)
    assert torch.equal(clipped.grad, grad)  # the gradient itself is left as it was


@given(sizes=sizes_strategy, max_norm=st.floats(0.01, 50.0), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=40, deadline=None)
def test_norm_and_clipping_agree_with_torch(sizes: list[int], max_norm: float, dtype: torch.dtype) -> None:
    state, slabs = fresh_state(sum(sizes), dtype), flat_layout(named(sizes))
    fill_grad(state, 3)
    params = [torch.nn.Parameter(torch.zeros(slab.numel, dtype=dtype)) for slab in slabs]
    for param, slab in zip(params, slabs, strict=True):
        param.grad = state.grad[slab.offset : slab.stop].clone()
    want = torch.nn.utils.clip_grad_norm_(params, max_norm)
    norm = global_norm(state.grad, slabs)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    assert norm == pytest.approx(want.item(), rel=tolerance)
    clipped = state.grad * clip_scale(norm, max_norm)
    torch.testing.assert_close(
        clipped, torch.cat([p.grad for p in params if p.grad is not None]), rtol=tolerance, atol=0
    )


@pytest.mark.parametrize("seed", range(8))
def test_the_norm_is_the_same_bits_in_any_order_and_at_any_offset(seed: int) -> None:
    """The same parameters in the flat order of another rank; float64, so that every rounding would show."""
    sizes = dict(named([5 * NORM_BLOCK + 17, 3, 40_000, 1000, 0, 77]))
    generator = torch.Generator().manual_seed(seed)
    grads = {name: torch.randn(n, generator=generator, dtype=torch.float64) for name, n in sizes.items()}
    orders = [list(sizes), list(sizes)[::-1], sorted(sizes, key=lambda name: sizes[name])]
    slabs = [flat_layout((name, sizes[name]) for name in order) for order in orders]
    sums = {sum_squares(torch.cat([grads[slab.name] for slab in order]), order) for order in slabs}
    assert len(sums) == 1


@pytest.mark.parametrize("seed", range(8))
def test_the_norm_is_the_same_bits_with_any_number_of_threads(seed: int) -> None:
    grad = torch.randn(400_000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    slabs = flat_layout(named([400_000]))
    alone = sum_squares(grad, slabs)
    torch.set_num_threads(2)
    try:
        assert sum_squares(grad, slabs) == alone
    finally:
        torch.set_num_threads(1)


def test_pieces_that_were_summed_in_larger_blocks_are_not_read_again() -> None:
    """A GPU's pieces, whose gradient has left for the host: blocks are those of where they were summed."""
    generator, gpu = torch.Generator().manual_seed(0), torch.device("cuda")
    slabs = flat_layout(named([5 * NORM_BLOCK + 17, 3, 40_000]))
    grad = torch.randn(slabs[-1].stop, generator=generator, dtype=torch.float64)
    whole, first = sum_squares(grad, slabs), slabs[1].stop
    known = {b: square(grad, b) for b in blocks(slabs, gpu) if b.stop <= first}
    assert [len(b) for b in known] == [5 * NORM_BLOCK + 17, 3]
    grad[:first] = float("nan")
    assert sum_squares(grad, slabs, known, gpu) == pytest.approx(whole, rel=1e-14)


def test_ranks_add_their_sums_of_squares() -> None:
    slabs = flat_layout(named([30, 40]))
    state = fresh_state(70, torch.float64)
    fill_grad(state, 1)
    other = sum_squares(state.grad, [slabs[1]])
    assert global_norm(state.grad, [slabs[0]], lambda own: (own, other)) == pytest.approx(
        global_norm(state.grad, slabs), rel=1e-15
    )


def test_small_gradients_do_not_vanish_in_the_norm() -> None:
    """A million elements of 1e-3 beside one of 1e4: float32 accumulation would lose them."""
    grad = torch.full((1_000_001,), 1e-3, dtype=torch.float32)
    grad[0] = 1e4
    want = math.sqrt(1e8 + 1_000_000 * float(grad[1]) ** 2)
    assert global_norm(grad, flat_layout([("p", 1_000_001)])) == pytest.approx(want, rel=1e-14)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(RunError, match=rf"optimizer: the gradient's norm is {bad}: the update is refused") as error:
        clip_scale(bad, 1.0)
    assert "try: lower optimizer.lr" in str(error.value)


def test_clip_scale_never_enlarges() -> None:
    assert clip_scale(0.5, 1.0) == 1.0
    assert clip_scale(0.5, None) == 1.0
    assert clip_scale(4.0, 1.0) == 1.0 / (4.0 + 1e-6)


@given(sizes=sizes_strategy, data=st.data())
def test_overlaps_tile_any_range(sizes: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, sum(sizes)))
    stop = data.draw(st.integers(start, sum(sizes)))
    parts = list(overlaps(flat_layout(named(sizes)), start, stop))
    assert [i for _, low, high in parts for i in range(low, high)] == list(range(start, stop))
    assert all(slab.offset <= low < high <= slab.stop for slab, low, high in parts)


def test_state_dtypes() -> None:
    assert state_dtype(torch.bfloat16) is torch.float32
    assert state_dtype(torch.float32) is torch.float32
    assert state_dtype(torch.float64) is torch.float64


def test_shapes_that_do_not_fit_are_our_own_bug() -> None:
    slabs, state = flat_layout(named([4])), fresh_state(5, torch.float32)
    with pytest.raises(AssertionError, match=r"flat state of shape \(5,\) for 4 elements"):
        ChunkedAdam(CONFIG, slabs, state, {})
    with pytest.raises(AssertionError, match="p0: snapshot of 3 elements, slab of 4"):
        ChunkedAdam(CONFIG, slabs, fresh_state(4, torch.float32), {"p0": torch.zeros(3)})


def test_a_workspace_may_lie_in_an_arena() -> None:
    """Workspaces are given, not allocated: here four views of one buffer, as of one planned object."""
    buffer = torch.zeros(4, 10)
    state, slabs = fresh_state(25, torch.float32), flat_layout(named([25]))
    fill_grad(state, 1)
    start = state.master.clone()
    ChunkedAdam(CONFIG, slabs, state, {}).step(chunks_of(25, 10), 1, workspace=Workspace(*buffer))
    assert torch.equal(state.master, reference(slabs, start, [state.grad], CONFIG)[0])
    assert buffer.abs().sum() > 0
