"""The pinned pool and the objects that move between it and the device: nothing lost, nothing invented, nothing grows.

host pool   | master  | moments | saved....|        slots, allocated once
device      |         |         |                   fetch: copy in     offload: copy out, pages gone
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.memfd import HostMemory
from rollplex.backends.memory.objects import ObjectStore, StateClass, StoredObject
from rollplex.backends.memory.pinned import PinnedPool, SlotSpec
from rollplex.backends.memory.table import HOST
from rollplex.ir.errors import OutOfMemory, PlanError

PAGE = 4096
MIB = 1 << 20

torch.set_num_threads(1)
MEMORY = HostMemory()


def host_ledger(capacity_bytes: int = 1 << 30) -> Ledger:
    return Ledger.create(HOST, capacity_bytes, process="train0")


def pool_of(*specs: SlotSpec, capacity_bytes: int = 1 << 30) -> PinnedPool:
    return PinnedPool(MEMORY, specs, host_ledger(capacity_bytes))


# --- slots ---


@given(sizes=st.lists(st.integers(0, 3 * PAGE), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_slots_lie_apart_and_keep_their_values(sizes: list[int]) -> None:
    specs = [SlotSpec(f"s{i}", nbytes) for i, nbytes in enumerate(sizes)]
    pool, again = pool_of(*specs), pool_of(*specs)
    assert [slot.offset for slot in pool.slots()] == [slot.offset for slot in again.slots()]  # deterministic
    for i, slot in enumerate(pool.slots()):
        slot.view(torch.uint8).fill_(i + 1)
    for i, slot in enumerate(pool.slots()):
        assert slot.view(torch.uint8).eq(i + 1).all()
        assert slot.view(torch.uint8).numel() == sizes[i]
    pool.close()
    again.close()


def test_planned_offsets_are_kept() -> None:
    pool = pool_of(SlotSpec("b", 100, offset=PAGE), SlotSpec("a", 64, offset=128))
    assert [pool.slot(name).offset for name in "ba"] == [PAGE, 128]
    assert pool.slot("b").view(torch.uint8).data_ptr() == pool.arena.address + PAGE


def test_views_of_a_slot() -> None:
    slot = pool_of(SlotSpec("a", 80)).slot("a")
    slot.view(torch.float32, (4, 5)).copy_(torch.arange(20.0).view(4, 5))
    assert slot.view(torch.float32, (2,), offset_bytes=72).tolist() == [18.0, 19.0]
    assert slot.view(torch.float32, offset_bytes=64).tolist() == [16.0, 17.0, 18.0, 19.0]
    with pytest.raises(AssertionError, match=r"slot a: view of \[40, 88\) bytes"):
        slot.view(torch.float64, (6,), offset_bytes=40)


def test_refused_pools() -> None:
    with pytest.raises(PlanError, match="pinned pool: slots named twice: a"):
        pool_of(SlotSpec("a", 1), SlotSpec("a", 2))
    with pytest.raises(PlanError, match="slots a and b overlap at byte 64"):
        pool_of(SlotSpec("b", 64, offset=64), SlotSpec("a", 65, offset=0))
    with pytest.raises(PlanError, match="no slot c; there are: a, b"):
        pool_of(SlotSpec("a", 1), SlotSpec("b", 1)).slot("c")
    with pytest.raises(OutOfMemory, match=r"host: allocate pinned: b asks for 8\.00 KiB, but 8\.00 KiB of 12\.00") as e:
        pool_of(SlotSpec("a", 2 * PAGE), SlotSpec("b", PAGE + 1), capacity_bytes=3 * PAGE)
    assert "raise the cluster's host memory" in str(e.value)


def test_pools_of_several_processes_share_the_host() -> None:
    ledger = host_ledger(10 * PAGE)
    other = Ledger.attach(ledger.export(), process="train1")
    PinnedPool(MEMORY, [SlotSpec("moments", 6 * PAGE)], ledger)
    with pytest.raises(OutOfMemory, match=r"24\.00 KiB  moments  \(train0\)"):
        PinnedPool(MEMORY, [SlotSpec("moments", 6 * PAGE)], other)


def test_pages_are_locked_or_the_reason_is_kept() -> None:
    pool = pool_of(SlotSpec("a", PAGE))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    locked = sum(int(line.split()[1]) for line in lines if line.startswith("Locked:"))
    assert pool.locked == (locked > 0)
    assert pool.locked != bool(pool.lock_error)
    refused = "mlock of 4096 bytes: not today"
    soft = PinnedPool(MEMORY, [SlotSpec("a", PAGE)], host_ledger(), pin=lambda arena: refused)
    assert (soft.locked, soft.lock_error) == (False, refused)
    soft.slot("a").view(torch.uint8).fill_(1)  # and it works all the same


def test_a_closed_pool_faults_and_is_counted_no_more() -> None:
    ledger = host_ledger()
    pool = PinnedPool(MEMORY, [SlotSpec("a", PAGE), SlotSpec("b", 1)], ledger)
    view = pool.slot("a").view(torch.float32)
    assert ledger.total_bytes == 2 * PAGE
    pool.close()
    pool.close()
    assert ledger.total_bytes == 0
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        view.sum()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGSEGV


# --- objects ---


def store_of(
    state_class: StateClass = "permanent",
    capacity_bytes: int = MIB,
    slot: bool = True,
    *,
    recomputable: bool = False,
    host_backed: bool = False,
    host_valid: bool = False,
) -> ObjectStore:
    """One object `x` of 10000 bytes (three pages)."""
    store = ObjectStore(Ledger.create("gpu0", capacity_bytes, process="train0"))
    host = pool_of(SlotSpec("x", 10_000)).slot("x") if slot else None
    arena = MEMORY.reserve("x", 10_000)
    store.add([StoredObject("x", state_class, 10_000, arena, host, recomputable, host_backed, host_valid)])
    store.ledger.mark("P3 update")
    return store


def host_copy(store: ObjectStore) -> torch.Tensor:
    slot = store["x"].slot
    assert slot is not None
    return slot.view(torch.float32)


def values(store: ObjectStore) -> torch.Tensor:
    return store.view("x", torch.float32)


def test_an_object_moves_out_and_in_unchanged() -> None:
    store = store_of()
    store.map("x", "map x")
    view = values(store)
    view.copy_(torch.arange(2500.0))
    store.wrote("x")
    store.offload("x", "offload x")
    assert not store.mapped("x")
    assert store.ledger.total_bytes == 0
    store.fetch("x", "fetch x")
    assert torch.equal(view, torch.arange(2500.0))  # the view from before
    assert store.ledger.total_bytes == 3 * PAGE
    assert [event.kind for event in store.ledger.events()] == ["acquire", "release", "acquire"]
    assert (store.offloaded.nbytes, store.fetched.nbytes) == (10_000, 10_000)
    assert store.fetched.seconds > 0
    assert store.fetched.bytes_per_s == 10_000 / store.fetched.seconds


def test_a_write_after_fetch_is_offloaded_again_an_unchanged_object_is_not() -> None:
    store = store_of()
    host_copy(store).fill_(1)
    store.filled("x")
    store.fetch("x", "fetch x")
    store.offload("x", "offload x")
    assert store.offloaded.nbytes == 0  # the host held the same bytes
    store.fetch("x", "fetch x")
    values(store).fill_(2)
    store.wrote("x")
    store.offload("x", "offload x")
    assert host_copy(store).eq(2).all()


def test_mapped_pages_are_fresh() -> None:
    store = store_of("phase-local")
    store.map("x", "map x")
    values(store).fill_(1)
    store.unmap("x", "unmap x")
    store.map("x", "map x")
    assert values(store).sum() == 0


def test_frozen_weights_come_back_as_often_as_wanted() -> None:
    store = store_of("regenerable", host_backed=True, host_valid=True)
    host_copy(store).fill_(7)
    for leave in (store.unmap, store.drop, store.offload):
        store.fetch("x", "fetch x")
        assert values(store).eq(7).all()
        leave("x", "leave x")
    store.fetch("x", "fetch x")
    with pytest.raises(PlanError, match="run update: x is frozen"):
        store.wrote("x", step="run update")


def refusal(match: str):
    return pytest.raises(PlanError, match=rf"train0: P3 update: {match}")


def test_refusals_name_object_and_step() -> None:
    store = store_of()
    with refusal(r"offload x: x is not mapped \(its contents are nowhere\)"):
        store.offload("x", "offload x")
    with refusal("unmap x: x is not mapped"):
        store.unmap("x", "unmap x")
    with refusal("fetch x: x has no valid host copy"):
        store.fetch("x", "fetch x")
    with refusal("run train mb 3: x is not mapped"):
        store.view("x", torch.float32, step="run train mb 3")
    with refusal("run: x is not mapped"):
        store.wrote("x")
    with refusal("drop x: x is permanent"):
        store.drop("x", "drop x")
    store.map("x", "map x")
    with refusal("map x: x is mapped already"):
        store.map("x", "map x")
    with refusal("fetch x: x is mapped already"):
        store.fetch("x", "fetch x")
    with refusal("adopt x: x is mapped already"):
        store.adopt("x", [], "rollout0", "adopt x")
    with refusal("unmap x: x is permanent and has no other copy"):
        store.unmap("x", "unmap x")
    store.offload("x", "offload x")
    with refusal(r"run: x is not mapped \(its contents are on the host\)"):
        store.view("x", torch.float32, step="run")
    with pytest.raises(PlanError, match="train0: no object y; there are: x"):
        store.map("y", "map y")


def test_a_stale_host_copy_cannot_be_fetched() -> None:
    store = store_of("regenerable")
    store.filled("x")
    store.fetch("x", "fetch x")
    store.wrote("x")
    store.unmap("x", "unmap x")
    with refusal("fetch x: x has no valid host copy"):
        store.fetch("x", "fetch x")


def test_drop_is_for_what_is_made_again() -> None:
    for store in (store_of("regenerable"), store_of("boundary", recomputable=True), store_of("phase-local")):
        store.filled("x")
        store.fetch("x", "fetch x")
        store.drop("x", "drop x")
        assert store.ledger.total_bytes == 0
        with refusal("fetch x: x has no valid host copy"):
            store.fetch("x", "fetch x")
    with refusal("drop x: x is a boundary that nothing recomputes"):
        store_of("boundary").drop("x", "drop x")


def test_an_object_without_a_slot_cannot_leave() -> None:
    store = store_of(slot=False)
    store.map("x", "map x")
    with refusal("offload x: x has no slot of its size in the pinned pool"):
        store.offload("x", "offload x")
    assert store.mapped("x")


def test_over_capacity_maps_nothing() -> None:
    store = store_of(capacity_bytes=2 * PAGE)
    with pytest.raises(OutOfMemory, match=r"gpu0: map x, window P3 update: x asks for 12\.00 KiB, but 0\.00"):
        store.map("x", "map x")
    assert not store.mapped("x")


def test_pages_that_the_machine_refuses_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_of()

    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OutOfMemory, match="host memory: the host gave no"):
        store.map("x", "map x")
    assert store.ledger.total_bytes == 0


def test_adopted_objects_are_counted_once_and_hold_their_owner_back() -> None:
    train = store_of("regenerable")
    rollout = ObjectStore(Ledger.attach(train.ledger.export(), process="rollout0"))
    rollout.add([StoredObject("x", "regenerable", 10_000, MEMORY.reserve("x", 10_000))])
    train.map("x", "map x")
    rollout.adopt("x", train["x"].arena.export(), "train0", "map x")
    values(train).fill_(3)
    assert values(rollout).eq(3).all()
    assert train.ledger.total_bytes == 3 * PAGE
    with pytest.raises(PlanError, match="unmap x: x is still mapped by rollout0"):
        train.unmap("x", "unmap x")
    assert values(train).eq(3).all()  # the refusal came before the pages went
    with pytest.raises(PlanError, match="x belongs to train0"):
        rollout.offload("x", "offload x")
    rollout.unmap("x", "unmap x")
    train.unmap("x", "unmap x")
    assert train.ledger.total_bytes == 0


def test_close_leaves_no_bytes_behind() -> None:
    train = store_of("permanent")
    rollout = ObjectStore(Ledger.attach(train.ledger.export(), process="rollout0"))
    rollout.add([StoredObject("x", "regenerable", 10_000, MEMORY.reserve("x", 10_000))])
    train.map("x", "map x")
    rollout.adopt("x", train["x"].arena.export(), "train0", "map x")
    rollout.close()
    train.close()
    assert train.ledger.live() == []
    assert not train.mapped("x")
