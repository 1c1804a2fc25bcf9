"""Saved prefix state goes where the policy says: once, without the weights, and never past its slot."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from host_tiny import CONFIG, arena_model, oracle_model, text_prompt, video_prompt
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollplex.backends.host.prefix import boundary_shape, run_prefix
from rollplex.backends.training.boundary import prefix_backward
from rollplex.backends.training.saved import AddressRanges, Packed, SavedPolicy, SavedState
from rollplex.backends.training.sizes import ALIGN
from rollplex.ir.errors import OutOfMemory


@pytest.fixture(scope="module")
def model() -> Any:
    return arena_model(oracle_model(CONFIG, torch.float32), CONFIG, torch.float32)[0]


def slot(tokens: int = 40) -> Tensor:
    return torch.zeros(boundary_shape(CONFIG, tokens))


def pool(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


def test_a_storage_is_packed_once_and_a_weight_never() -> None:
    """x is saved by both products, w is borrowed, w.t() is the same memory: 1 pack of 4 x 16 floats."""
    weight = torch.randn(16, 16, requires_grad=True)
    x = torch.randn(4, 16, requires_grad=True)
    state = SavedState(SavedPolicy("host", pool=pool(4096)), AddressRanges([weight]), "here")
    with state.hooks():
        loss = (x @ weight + x @ weight.t()).sum()
    assert state.nbytes == 4 * 16 * 4
    loss.backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, (weight.t() + weight).sum(0).detach().expand(4, 16))


@given(sizes=st.lists(st.integers(1, 700), min_size=1, max_size=12), lines=st.integers(1, 40))
def test_tensors_of_any_sizes_lie_in_the_range_of_their_object_or_are_refused(sizes: list[int], lines: int) -> None:
    """|other| saved state of `lines` x 64 bytes |other|: each at a multiple of 64, and nothing beside it changes."""
    whole = torch.full(((lines + 2) * ALIGN,), 99, dtype=torch.uint8)
    place = whole[ALIGN:-ALIGN]
    state = SavedState(SavedPolicy("host", pool=place), AddressRanges([]), "row 3")
    tensors = [torch.full((n,), i + 1, dtype=torch.uint8) for i, n in enumerate(sizes)]
    packed, fits = list[Any](), sum(-(-n // ALIGN) * ALIGN for n in sizes) <= place.numel()
    with nullcontext() if fits else pytest.raises(OutOfMemory, match=r"row 3: the saved state .* needs more than"):
        packed.extend(map(state._pack, tensors))  # those before the one that is refused are there
    assert all(isinstance(p, Packed) and p.start % ALIGN == 0 for p in packed)
    assert all(torch.equal(state._unpack(p), x) for p, x in zip(packed, tensors, strict=False))
    assert whole[:ALIGN].eq(99).all()
    assert whole[-ALIGN:].eq(99).all()


def test_a_freed_storage_is_not_mistaken_for_its_successor() -> None:
    """Two temporaries that the allocator puts at one address are two storages."""
    state = SavedState(SavedPolicy("host", pool=pool(1 << 16)), AddressRanges([]), "here")
    x = torch.ones(512, requires_grad=True)
    total = torch.zeros(())
    with state.hooks():
        for i in range(8):
            total = total + (x * torch.full((512,), float(i))).sum()
    total.backward()
    assert x.grad is not None
    assert x.grad[0] == sum(range(8))


def test_every_byte_the_host_policy_keeps_is_in_the_pool(model: Any) -> None:
    """Scribbling over the pool changes the gradient: the backward reads from there."""
    prompt, shared = video_prompt(model), pool(4 << 20)
    grads = []
    for scribble in (False, True):
        model.zero_grad()
        result = run_prefix(model, prompt, slot(), attached=True, saved=SavedPolicy("host", pool=shared))
        if scribble:
            numbers = shared[: result.saved_nbytes].view(torch.float32)
            numbers[(numbers.abs() > 1e-3) & (numbers.abs() < 1e3)] *= 1.01  # leaves packed masks and ids alone
        prefix_backward(result, torch.ones_like(result.kv))
        grads.append(model.model.visual.blocks[0].mlp.down_proj.weight.grad.clone())
    assert not torch.equal(*grads)


def test_recompute_keeps_less_and_dropped_nothing(model: Any) -> None:
    """all saved tensors > layer inputs > nothing."""
    kept = [
        run_prefix(model, video_prompt(model), slot(), attached=True, saved=policy).saved_nbytes
        for policy in (SavedPolicy("hbm"), SavedPolicy("hbm", "full"), SavedPolicy("dropped"))
    ]
    assert kept[0] > 3 * kept[1] > kept[2] == 0


def test_a_pool_slot_that_is_too_small_names_the_prompt_and_the_bytes(model: Any) -> None:
    """The pinned pool is allocated once: there is nowhere else to go."""
    with pytest.raises(
        OutOfMemory, match=r"row 1: the saved state .* needs more than [\d,]+ bytes, its slot has 8,192"
    ):
        run_prefix(model, video_prompt(model), slot(), attached=True, saved=SavedPolicy("host", pool=pool(8192)))


def test_a_prompt_longer_than_its_boundary_slot_is_refused(model: Any) -> None:
    """8 prefix tokens do not fit 7."""
    with pytest.raises(OutOfMemory, match="row 2: the prompt has 8 prefix tokens, its boundary slot 7"):
        run_prefix(model, text_prompt(9), slot(7), attached=False)
