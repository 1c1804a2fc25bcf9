"""Host arenas: stable addresses, pages that really go, faults after unmap, one physical copy for two processes.

owner    |== reserved ==|  map -> write -> export fds ----socket----> reader   |== reserved ==|  adopt, read-only
         |== reserved ==|  unmap: a touch faults                               |== same pages =|
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.backends.base import Arena, Memory
from rollplex.backends.memory.memfd import HostArena, HostMemory
from rollplex.ir.errors import OutOfMemory, PlanError

PAGE = 4096
MIB = 1 << 20

torch.set_num_threads(1)


@pytest.fixture
def memory() -> HostMemory:
    return HostMemory(chunk_bytes=4 * MIB)


def child(work: Callable[[], object]) -> int:
    """How a forked child ends that does `work`: 0, 1 if it raised, or minus the signal that killed it."""
    pid = os.fork()
    if pid == 0:
        faulthandler.disable()
        try:
            work()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def shared_bytes() -> int:
    """Shared memory of the whole machine, as the kernel counts it."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:"))
    return int(line.split()[1]) * 1024


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it holds within 5 s: other programs of this machine map and unmap too."""
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def held_bytes(arena: HostArena) -> int:
    """Bytes of the arena's pages that exist."""
    fds = arena.export()
    blocks = [os.fstat(fd).st_blocks for fd in fds]
    close_fds(fds)
    return 512 * sum(blocks)


def close_fds(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def open_fds() -> int:
    gc.collect()  # what earlier tests left in tracebacks
    return len(os.listdir("/proc/self/fd"))


def test_the_classes_fit_the_protocols(memory: HostMemory) -> None:
    assert isinstance(memory, Memory)
    assert isinstance(memory.reserve("x", 1), Arena)


@given(nbytes=st.integers(0, 20 * MIB), chunk_pages=st.integers(1, 2048))
@settings(max_examples=25, deadline=None)
def test_ranges_are_whole_pages_and_chunks_cover_them(nbytes: int, chunk_pages: int) -> None:
    arena = HostMemory(chunk_bytes=max(chunk_pages, 16) * PAGE).reserve("x", nbytes)
    assert arena.nbytes % PAGE == 0
    assert nbytes <= arena.nbytes < nbytes + PAGE + (nbytes == 0)
    arena.map()
    fds = arena.export()
    assert sum(os.fstat(fd).st_size for fd in fds) == arena.nbytes
    assert [os.fstat(fd).st_ino for fd in fds] == arena.inodes()
    close_fds(fds)
    last = arena.view(arena.nbytes - 1, (1,), torch.uint8)
    last.fill_(7)
    assert last.item() == 7
    arena.close()


def test_address_and_views_stay_while_pages_come_and_go(memory: HostMemory) -> None:
    arena = memory.reserve("weights", 10 * MIB)
    view = arena.view(4 * MIB, (1000,), torch.float32)  # made before there are pages
    address = arena.address
    for value in (1.0, 2.0):
        arena.map()
        assert view.sum() == 0  # fresh pages
        view.fill_(value)
        assert arena.view(4 * MIB, (1000,), torch.float32).sum() == 1000 * value
        arena.unmap()
        assert (arena.address, view.data_ptr()) == (address, address + 4 * MIB)


def test_pages_exist_at_map_and_go_at_unmap(memory: HostMemory) -> None:
    nbytes = 256 * MIB
    arena = memory.reserve("big", nbytes)
    before = shared_bytes()
    arena.map()  # nobody has touched them, and still they are there: as on a GPU
    assert held_bytes(arena) == nbytes
    assert shared_bytes() - before > 0.5 * nbytes
    arena.unmap()
    assert eventually(lambda: shared_bytes() - before < 0.2 * nbytes)


def test_pages_stay_while_an_adopter_holds_them(memory: HostMemory) -> None:
    nbytes = 256 * MIB
    owner, reader = memory.reserve("w", nbytes), memory.reserve("w", nbytes)
    before = shared_bytes()
    owner.map()
    owner.view(0, (1,), torch.int64).fill_(5)
    reader.adopt(owner.export())
    owner.unmap()
    assert shared_bytes() - before > 0.5 * nbytes
    assert reader.view(0, (1,), torch.int64).item() == 5
    reader.unmap()
    assert eventually(lambda: shared_bytes() - before < 0.2 * nbytes)


def test_touch_after_unmap_faults(memory: HostMemory) -> None:
    arena = memory.reserve("kv", MIB)
    view = arena.view(0, (16,), torch.float32)
    arena.map()
    assert child(view.sum) == 0
    arena.unmap()
    assert child(view.sum) == -signal.SIGSEGV
    assert child(lambda: view.fill_(1)) == -signal.SIGSEGV


def test_a_view_outlives_its_arena_without_reading_strangers(memory: HostMemory) -> None:
    arena = memory.reserve("old", MIB)
    arena.map()
    view = arena.view(0, (16,), torch.float32)
    address = arena.address
    arena.close()
    arena.close()
    del arena
    gc.collect()
    others = [memory.reserve("new", MIB) for _ in range(64)]
    assert address not in {other.address for other in others}
    assert child(view.sum) == -signal.SIGSEGV


def test_a_range_goes_with_its_last_view(memory: HostMemory) -> None:
    def ranges() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    arenas = [memory.reserve("x", MIB) for _ in range(50)]
    _ = [arena.map() for arena in arenas[::2]]  # every second, so that the kernel cannot join neighbours
    views = [arena.view(0, (4,), torch.int32) for arena in arenas]
    many = ranges()
    del arenas
    gc.collect()
    assert ranges() == many
    del views
    gc.collect()
    assert ranges() <= many - 25


def test_adopted_pages_are_the_same_pages_and_read_only(memory: HostMemory) -> None:
    owner, reader = memory.reserve("w", 10 * MIB), memory.reserve("w", 10 * MIB)
    owner.map()
    reader.adopt(owner.export())
    assert reader.adopted
    assert not owner.adopted
    assert len(owner.inodes()) == 3  # chunks of 4 MiB
    assert owner.inodes() == reader.inodes()
    written = owner.view(9 * MIB, (8,), torch.bfloat16)
    read = reader.view(9 * MIB, (8,), torch.bfloat16)
    written.fill_(3)
    assert read.tolist() == [3.0] * 8
    assert child(lambda: read.fill_(4)) == -signal.SIGSEGV
    assert written.tolist() == [3.0] * 8


def test_adopt_may_be_writable(memory: HostMemory) -> None:
    owner, reader = memory.reserve("w", PAGE), memory.reserve("w", PAGE)
    owner.map()
    reader.adopt(owner.export(), writable=True)
    reader.view(0, (1,), torch.int64).fill_(9)
    assert owner.view(0, (1,), torch.int64).item() == 9


def test_another_process_reads_what_the_owner_writes(memory: HostMemory) -> None:
    ours, theirs = socket.socketpair()
    owner = memory.reserve("w", 10 * MIB)

    def reader() -> None:
        ours.close()
        _, fds, _, _ = socket.recv_fds(theirs, 1, 8)
        arena = HostMemory().reserve("w", 10 * MIB)
        view = arena.view(0, (4,), torch.float64)
        arena.adopt(fds)
        theirs.sendall(b"a")  # adopted; now the owner writes
        theirs.recv(1)
        assert view.tolist() == [2.5] * 4

    owner.map()
    pid = os.fork()
    if pid == 0:
        os._exit(child(reader) & 0xFF)
    theirs.close()
    fds = owner.export()
    socket.send_fds(ours, [b"f"], fds)
    close_fds(fds)
    assert ours.recv(1) == b"a"
    owner.view(0, (4,), torch.float64).fill_(2.5)
    ours.sendall(b"w")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool])
def test_views_of_every_dtype(memory: HostMemory, dtype: torch.dtype) -> None:
    arena = memory.reserve("x", PAGE)
    arena.map()
    view = arena.view(64, (3, 5), dtype)
    assert (view.dtype, view.shape, view.data_ptr()) == (dtype, (3, 5), arena.address + 64)
    view.fill_(1)
    assert view.double().sum() == 15
    assert arena.view(128, (0, 4), dtype).shape == (0, 4)


def test_a_transposed_parameter_over_pages_trains_in_place(memory: HostMemory) -> None:
    arena = memory.reserve("w", PAGE)
    arena.map()
    weight = torch.nn.Parameter(arena.view(0, (2, 3), torch.float32))
    with torch.no_grad():
        weight.copy_(torch.arange(6.0).view(2, 3))
    (torch.nn.functional.linear(torch.ones(1, 2), weight.t())).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1.0] * 3] * 2
    assert arena.view(0, (6,), torch.float32).tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("args", [(0, (PAGE + 1,), torch.uint8), (-8, (1,), torch.int64), (2, (1,), torch.float32)])
def test_a_view_outside_the_range_is_our_own_bug(memory: HostMemory, args: tuple) -> None:
    with pytest.raises(AssertionError, match="x: "):
        memory.reserve("x", PAGE).view(*args)


def test_refusals(memory: HostMemory) -> None:
    arena, other = memory.reserve("kv", 2 * PAGE), memory.reserve("w", PAGE)
    with pytest.raises(PlanError, match="kv: unmap of an arena that is not mapped"):
        arena.unmap()
    with pytest.raises(PlanError, match="kv: export of an arena without pages"):
        arena.export()
    arena.map()
    with pytest.raises(PlanError, match="kv: map of an arena that is mapped already"):
        arena.map()
    with pytest.raises(PlanError, match="w: adopt of 8192 bytes into a range of 4096 bytes"):
        other.adopt(arena.export())
    same = memory.reserve("kv", 2 * PAGE)
    same.adopt(arena.export())
    with pytest.raises(PlanError, match="kv: adopt into an arena that is mapped already"):
        same.adopt(arena.export())
    with pytest.raises(PlanError, match="kv: export of pages that another process owns"):
        same.export()


def test_a_full_machine_is_an_error_and_leaves_nothing(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The third chunk finds no room: the kernel's refusal comes up as OutOfMemory and the first two chunks go."""
    real, calls = os.posix_fallocate, iter(range(100))

    def refuse(fd: int, offset: int, length: int) -> None:
        if next(calls) == 2:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    arena, before, fds = memory.reserve("kv", 64 * MIB), shared_bytes(), open_fds()
    with pytest.raises(
        OutOfMemory, match=r"the host gave no 4194304 bytes of 67108864 for kv \(No space left"
    ) as error:
        arena.map()
    assert "try: free memory" in str(error.value)
    assert not arena.mapped
    assert open_fds() == fds
    assert eventually(lambda: shared_bytes() - before < 4 * MIB)
    arena.map()  # and the arena is as good as before
    assert arena.view(0, (1,), torch.int64).item() == 0


def test_no_address_space_is_an_error(memory: HostMemory) -> None:
    with pytest.raises(OutOfMemory, match=r"no address range of \d+ bytes for huge"):
        memory.reserve("huge", 1 << 60)


def test_nothing_leaks_over_many_rounds(memory: HostMemory) -> None:
    arena, reader = memory.reserve("w", 10 * MIB), memory.reserve("w", 10 * MIB)
    view = reader.view(0, (1,), torch.int64)
    before = open_fds(), shared_bytes()
    for turn in range(100):
        arena.map()
        arena.view(0, (1,), torch.int64).fill_(turn)
        reader.adopt(arena.export())
        assert view.item() == turn
        reader.unmap()
        arena.unmap()
    assert open_fds() == before[0]
    assert eventually(lambda: shared_bytes() - before[1] < 8 * MIB)


def test_pages_vanish_with_a_killed_process(memory: HostMemory) -> None:
    before = shared_bytes()

    def hold() -> None:
        arena = memory.reserve("w", 256 * MIB)
        arena.map()
        os.kill(os.getpid(), signal.SIGKILL)

    assert child(hold) == -signal.SIGKILL
    assert eventually(lambda: shared_bytes() - before < 64 * MIB)
    assert not [name for name in os.listdir("/dev/shm") if "rollplex" in name]
