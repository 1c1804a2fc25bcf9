"""The pinned pool and the objects that move between it and the device: nothing lost, nothing invented, nothing grows.

host pool   | master  | moments | saved ...... |     allocated once; every object at its place
            | master  | moments | gradients |        saved state has been freed: they lie where it was
device      |         |         |                    fetch: copy in     offload: copy out, pages gone
"""

from __future__ import annotations

import faulthandler
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.backends.memory.host import HostDevice
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.memfd import HostMemory
from rollplex.backends.memory.objects import ObjectStore, StateClass, StoredObject
from rollplex.backends.memory.pinned import PinnedPool, Place, stretches
from rollplex.backends.memory.table import HOST
from rollplex.ir.errors import OutOfMemory, PlanError

PAGE = 4096
MIB = 1 << 20

torch.set_num_threads(1)
MEMORY = HostMemory()


def host_ledger(capacity_bytes: int = 1 << 30) -> Ledger:
    return Ledger.create(HOST, capacity_bytes, process="train0")


def pool_of(*places: Place, capacity_bytes: int = 1 << 30) -> PinnedPool:
    """A pool in which everything is in use, as far as nothing else is there."""
    pool = PinnedPool(MEMORY, places, host_ledger(capacity_bytes))
    for slot in pool.slots():
        slot.take("load")
    return pool


def stacked(*sizes: int, first: int = 0) -> list[Place]:
    """Places one behind the other."""
    return [Place(f"s{i}", first + sum(sizes[:i]), size) for i, size in enumerate(sizes)]


# --- places ---


@given(pages=st.lists(st.integers(1, 3), min_size=1, max_size=8), first=st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_objects_lie_at_their_places_and_keep_their_values(pages: list[int], first: int) -> None:
    """Counted from the first byte that this process has: below it other processes may have theirs."""
    pool = pool_of(*stacked(*(n * PAGE for n in pages), first=first * PAGE))
    for i, slot in enumerate(pool.slots()):
        slot.view(torch.uint8).fill_(i + 1)
    base = pool.slots()[0].view(torch.uint8).data_ptr() - first * PAGE
    for i, slot in enumerate(pool.slots()):
        assert slot.view(torch.uint8).eq(i + 1).all()
        assert slot.view(torch.uint8).numel() == pages[i] * PAGE
        assert slot.view(torch.uint8).data_ptr() == base + slot.place.offset
    pool.close()


def test_a_process_has_pages_behind_its_own_places_alone() -> None:
    """Bytes 8192 to 12288 are another process'; what lies at one address, one after the other, has pages once."""
    pool = PinnedPool(
        MEMORY, [Place("c", 3 * PAGE, PAGE), Place("a", 0, 2 * PAGE), Place("b", PAGE, PAGE)], host_ledger()
    )
    assert stretches(s.place for s in pool.slots()) == [(0, 2 * PAGE), (3 * PAGE, 4 * PAGE)]
    assert pool.nbytes == 3 * PAGE
    pool.slot("a").take("x")
    a = pool.slot("a").view(torch.uint8)
    a.fill_(7)
    pool.slot("a").free("x")
    pool.slot("b").take("y")
    assert pool.slot("b").view(torch.uint8).data_ptr() == a.data_ptr() + PAGE
    assert pool.slot("b").view(torch.uint8).eq(7).all()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 6)), max_size=8))
def test_stretches_are_the_bytes_that_places_cover(pairs: list[tuple[int, int]]) -> None:
    found = stretches(Place(str(i), *pair) for i, pair in enumerate(pairs))
    assert {b for start, stop in found for b in range(start, stop)} == {b for a, n in pairs for b in range(a, a + n)}
    assert all(a[1] < b[0] for a, b in pairwise(found))


def test_views_of_a_slot() -> None:
    slot = pool_of(Place("a", 0, 80)).slot("a")
    slot.view(torch.float32, (4, 5)).copy_(torch.arange(20.0).view(4, 5))
    assert slot.view(torch.float32, (2,), offset_bytes=72).tolist() == [18.0, 19.0]
    assert slot.view(torch.float32, offset_bytes=64).tolist() == [16.0, 17.0, 18.0, 19.0]


def test_a_put_outside_of_its_place_names_whose_place_that_is() -> None:
    pool = pool_of(Place("a", 0, 80), Place("b", 128, 64))
    with pytest.raises(PlanError, match=r"pinned pool: bytes 40 to 88 are not those of a \(bytes 0 to 80\): .* no obj"):
        pool.slot("a").view(torch.float64, (6,), offset_bytes=40)
    with pytest.raises(PlanError, match=r"bytes 0 to 160 are not those of a \(.*\): they are b \(bytes 128 to 192\)"):
        pool.slot("a").view(torch.float32, (40,))


def test_a_put_over_a_live_neighbour_names_both_and_leaves_it_as_it_is() -> None:
    """Of one process or of two of a GPU; when the neighbour is gone the place may be taken."""
    pool = PinnedPool(MEMORY, [Place("saved", 0, 2 * PAGE), Place("gradients", PAGE, PAGE)], ledger := host_ledger())
    other = PinnedPool(MEMORY, [Place("carried", 0, 64)], Ledger.attach(ledger.export(), process="rollout0"))
    pool.slot("saved").take("run prefix")
    pool.slot("saved").view(torch.uint8).fill_(5)
    both = (
        r"host: offload gradients: gradients goes to bytes 4096 to 8192, and saved \(train0\) is there, in bytes 0 to"
    )
    with pytest.raises(PlanError, match=both):
        pool.slot("gradients").take("offload gradients")
    with pytest.raises(PlanError, match=r"carried goes to bytes 0 to 64, and saved \(train0\) is there"):
        other.slot("carried").take("load")
    with pytest.raises(PlanError, match=r"gradients \(bytes 4096 to 8192\) is not in use now: another object may lie"):
        pool.slot("gradients").view(torch.uint8)
    assert pool.slot("saved").view(torch.uint8).eq(5).all()
    pool.slot("saved").free("run prefix_backward")
    pool.slot("gradients").take("offload gradients")
    other.slot("carried").take("load")
    assert [e.place for e in ledger.events() if e.kind == "acquire"] == [(0, 2 * PAGE), (PAGE, 2 * PAGE)]


def test_taking_and_freeing_again_is_no_change() -> None:
    pool = PinnedPool(MEMORY, [Place("a", 0, PAGE)], ledger := host_ledger())
    for _ in range(2):
        pool.slot("a").take("run prefix mb")
    for _ in range(2):
        pool.slot("a").free("run prefix_backward mb 1")
    assert [e.kind for e in ledger.events()] == ["acquire", "release"]


def test_refused_pools() -> None:
    with pytest.raises(PlanError, match="pinned pool: slots named twice: a"):
        pool_of(Place("a", 0, 1), Place("a", 64, 2))
    with pytest.raises(PlanError, match=r"b \(bytes 65 to 70\) does not begin at a multiple of 64 bytes"):
        pool_of(Place("a", 0, 64), Place("b", 65, 5))
    with pytest.raises(PlanError, match="no slot c; there are: a, b"):
        pool_of(Place("a", 0, 1), Place("b", 64, 1)).slot("c")
    with pytest.raises(
        OutOfMemory, match=r"host: allocate pinned: b \(bytes 8192 to 12289\) ends .*\(1 bytes\) too"
    ) as e:
        pool_of(Place("a", 0, 2 * PAGE), Place("b", 2 * PAGE, PAGE + 1), capacity_bytes=3 * PAGE)
    assert "raise the cluster's host memory" in str(e.value)


def test_pages_are_locked_or_the_reason_is_kept() -> None:
    pool = pool_of(Place("a", 0, PAGE))
    lines = Path("/proc/self/smaps").read_text().splitlines()
    locked = sum(int(line.split()[1]) for line in lines if line.startswith("Locked:"))
    assert pool.locked == (locked > 0)
    assert pool.locked != bool(pool.lock_error)
    refused = "mlock of 4096 bytes: not today"
    soft = PinnedPool(MEMORY, [Place("a", 0, PAGE)], host_ledger(), pin=lambda arena: refused)
    assert (soft.locked, soft.lock_error) == (False, refused)
    soft.slot("a").take("load")
    soft.slot("a").view(torch.uint8).fill_(1)  # and it works all the same


def test_a_closed_pool_faults_and_is_counted_no_more() -> None:
    ledger = host_ledger()
    pool = PinnedPool(MEMORY, [Place("a", 0, PAGE), Place("b", PAGE, 1)], ledger)
    for slot in pool.slots():
        slot.take("load")
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
    store = ObjectStore(Ledger.create("gpu0", capacity_bytes, process="train0"), HostDevice())
    host = PinnedPool(MEMORY, [Place("x", PAGE, 10_000)], host_ledger()).slot("x") if slot else None
    arena = MEMORY.reserve("x", 10_000)
    store.add([StoredObject("x", state_class, 10_000, arena, host, recomputable, host_backed, host_valid)])
    store.ledger.mark("P3 update")
    return store


def host_copy(store: ObjectStore) -> torch.Tensor:
    slot = store["x"].slot
    assert slot is not None
    slot.take("load")
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


class Hoarder(HostDevice):
    """A device whose allocator keeps `kept` blocks for later: pages are refused until they are handed back.

    map        refused     trim, map     has pages, if what was kept was all that was missing
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.kept, self.others, self.trims = 0, 0, 0
        give = os.posix_fallocate

        def fallocate(fd: int, offset: int, length: int) -> None:
            if self.kept + self.others:
                raise OSError(12, "out of memory")
            give(fd, offset, length)

        monkeypatch.setattr(os, "posix_fallocate", fallocate)

    def trim(self) -> None:
        self.trims += 1
        self.kept = 0

    def free_bytes(self) -> int:
        return 2 * PAGE


def hoarded(monkeypatch: pytest.MonkeyPatch, others: int = 0) -> tuple[ObjectStore, Hoarder]:
    """One object `x` of three pages, each of which may come by itself, whose host copy is valid."""
    device = Hoarder(monkeypatch)
    store = ObjectStore(Ledger.create("gpu0", MIB, process="train0"), device)
    host = PinnedPool(MEMORY, [Place("x", PAGE, 3 * PAGE)], host_ledger()).slot("x")
    arena = MEMORY.reserve("x", 3 * PAGE, cuts=(PAGE, 2 * PAGE))
    store.add([StoredObject("x", "regenerable", 3 * PAGE, arena, host)])
    store.filled("x")
    store.ledger.mark("P3 update")
    device.kept, device.others = 1, others
    return store, device


ASKS = {
    "map": (lambda store: store.map("x", "map x"), 3),
    "map_part": (lambda store: store.map_part("x", PAGE, 2 * PAGE, "map_part x"), 1),
    "fetch": (lambda store: store.fetch("x", "fetch x"), 3),
}


@pytest.mark.parametrize("kind", ASKS)
def test_kept_blocks_are_handed_back_where_pages_are_missing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, pages = ASKS[kind]
    store, hoarder = hoarded(monkeypatch)
    ask(store)
    assert (hoarder.trims, store.mapped("x"), store.ledger.total_bytes) == (1, True, pages * PAGE)
    assert len(store["x"].arena.inodes()) == pages


@pytest.mark.parametrize("kind", ASKS)
def test_pages_that_others_have_are_an_error_that_says_how_many(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ask, pages = ASKS[kind]
    store, hoarder = hoarded(monkeypatch, others=1)
    with pytest.raises(OutOfMemory) as error:
        ask(store)
    asked = f"{4 * pages}.00 KiB"
    assert str(error.value).splitlines() == [
        f"train0: P3 update: {kind} x: x asks for {asked}, the device has 8.00 KiB free; by the plan {asked} of 1.00 "
        f"MiB are live with it (host memory: the host gave no 4096 bytes of 12288 for x (out of memory))",
        "    try: end other programs that have its memory, or lower cluster.capacity_gib and compile again",
    ]
    assert (hoarder.trims, store.mapped("x"), store.ledger.total_bytes) == (1, False, 0)


def test_what_the_plan_has_no_room_for_is_not_asked_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    store, hoarder = hoarded(monkeypatch)
    store.ledger.acquire("y", MIB - PAGE, "map y")
    with pytest.raises(OutOfMemory, match=r"gpu0: map x, window P3 update: x asks for 12\.00 KiB"):
        store.map("x", "map x")
    assert hoarder.trims == 0


def test_adopted_objects_are_counted_once_and_hold_their_owner_back() -> None:
    train = store_of("regenerable")
    rollout = ObjectStore(Ledger.attach(train.ledger.export(), process="rollout0"), HostDevice())
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
    rollout = ObjectStore(Ledger.attach(train.ledger.export(), process="rollout0"), HostDevice())
    rollout.add([StoredObject("x", "regenerable", 10_000, MEMORY.reserve("x", 10_000))])
    train.map("x", "map x")
    rollout.adopt("x", train["x"].arena.export(), "train0", "map x")
    rollout.close()
    train.close()
    assert train.ledger.live() == []
    assert not train.mapped("x")
