"""Arenas on a GPU: the contract of tests/test_memory.py where pages are the driver's, and what only a GPU has.

Skipped without a GPU. A wild touch ends a CUDA context for good, so such touches happen in processes of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from textwrap import dedent

import pytest
import torch

from rollplex.backends.base import Arena, Memory
from rollplex.backends.memory.fds import close_all
from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.objects import ObjectStore, StoredObject
from rollplex.ir.errors import OutOfMemory, PlanError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU and cuda-python")

MIB = 1 << 20


@pytest.fixture
def memory() -> Memory:
    from rollplex.backends.cuda.vmm import CudaMemory

    return CudaMemory(0, chunk_bytes=64 * MIB)


def free() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def in_a_process(body: str, fds: Sequence[int] = ()) -> subprocess.CompletedProcess[str]:
    """Run lines that have `memory`, `fds` and torch; those of other processes see our pages through `fds`."""
    script = f"""
import torch
from rollplex.backends.cuda.vmm import CudaMemory
memory = CudaMemory(0, chunk_bytes={64 * MIB})
fds = {list(fds)!r}
{dedent(body)}
torch.cuda.synchronize()
"""
    command = [sys.executable, "-c", script]
    return subprocess.run(command, pass_fds=fds, capture_output=True, text=True, timeout=120)


def test_the_classes_fit_the_protocols(memory: Memory) -> None:
    assert isinstance(memory, Memory)
    assert isinstance(memory.reserve("x", 1), Arena)
    assert memory.reserve("x", 1).nbytes == memory.page_bytes


def test_address_and_views_stay_while_pages_come_and_go(memory: Memory) -> None:
    arena = memory.reserve("weights", 160 * MIB)  # chunks of 64, 64 and 32 MiB
    view = arena.view(100 * MIB, (1000,), torch.bfloat16)  # made before there are pages
    address = arena.address
    for value in (1.0, 2.0):
        arena.map()
        assert view.float().sum() == 0  # fresh pages
        view.fill_(value)
        assert arena.view(100 * MIB, (1000,), torch.bfloat16).float().sum() == 1000 * value
        arena.unmap()
        assert (arena.address, view.data_ptr()) == (address, address + 100 * MIB)


def test_pages_are_the_gpus_while_mapped_and_not_after(memory: Memory) -> None:
    arena = memory.reserve("big", 1024 * MIB)
    before = free()
    arena.map()
    assert before - free() == 1024 * MIB
    arena.unmap()
    assert free() == before


def test_parts_come_and_go_by_themselves_and_cross_whole(memory: Memory) -> None:
    """The pages of an update: they come in order, hold what was written, and another process takes all of them."""
    arena = memory.reserve("w", 192 * MIB, cuts=(32 * MIB, 96 * MIB))
    before = free()
    for start, stop in ((0, 32 * MIB), (32 * MIB, 96 * MIB), (96 * MIB, 192 * MIB)):
        arena.map_part(start, stop)
        assert before - free() == stop
        arena.view(start, (1000,), torch.float32).fill_(1.0 + start // MIB)
    assert [arena.view(at * MIB, (1,), torch.float32).item() for at in (0, 32, 96)] == [1.0, 33.0, 97.0]
    fds = arena.export()
    told = in_a_process(
        f"""
        arena = memory.reserve("w", {192 * MIB}, cuts=({32 * MIB}, {96 * MIB}))
        arena.adopt(fds)
        print([arena.view(at * {MIB}, (1,), torch.float32).item() for at in (0, 32, 96)])
        """,
        fds,
    )
    close_all(fds)
    assert told.stdout.strip() == "[1.0, 33.0, 97.0]", told.stderr
    arena.unmap_part(0, 32 * MIB)
    assert before - free() == 160 * MIB
    arena.unmap()
    assert free() == before


def test_a_captured_graph_replays_over_new_pages(memory: Memory) -> None:
    arena = memory.reserve("w", 64 * MIB)
    arena.map()
    weight = arena.view(0, (1024, 1024), torch.bfloat16)
    x = torch.ones(8, 1024, device="cuda", dtype=torch.bfloat16)
    torch.nn.functional.linear(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = torch.nn.functional.linear(x, weight)
    for value in (1.0, 3.0):
        arena.unmap()
        arena.map()
        weight.fill_(value)
        graph.replay()
        assert y.float().unique().tolist() == [1024 * value]


def test_another_process_reads_what_the_owner_writes_and_costs_nothing(memory: Memory) -> None:
    owner = memory.reserve("w", 160 * MIB)
    owner.map()
    owner.view(150 * MIB, (4,), torch.float32).fill_(2.5)
    fds = owner.export()
    done = in_a_process(
        """
        torch.zeros(1, device="cuda")
        before = torch.cuda.mem_get_info()[0]
        arena = memory.reserve("w", 160 << 20)
        arena.adopt(fds)
        assert arena.adopted
        assert before - torch.cuda.mem_get_info()[0] < 4 << 20  # no second copy
        assert arena.view(150 << 20, (4,), torch.float32).tolist() == [2.5] * 4
        arena.unmap()
        """,
        fds,
    )
    close_all(fds)
    assert done.returncode == 0, done.stderr


def test_adopted_pages_are_read_only_unless_asked(memory: Memory) -> None:
    owner = memory.reserve("w", 2 * MIB)
    owner.map()
    for writable, ends in ((False, 1), (True, 0)):
        fds = owner.export()
        body = f"""
        arena = memory.reserve("w", 2 << 20)
        arena.adopt(fds, writable={writable})
        arena.view(0, (8,), torch.float32).fill_(4)
        """
        done = in_a_process(body, fds)
        close_all(fds)
        assert done.returncode == ends, done.stderr
    assert owner.view(0, (8,), torch.float32).tolist() == [4.0] * 8


def test_touch_after_unmap_is_an_error_of_the_driver() -> None:
    done = in_a_process(
        """
        arena = memory.reserve("kv", 2 << 20)
        view = arena.view(0, (16,), torch.float32)
        arena.map()
        view.fill_(1)
        arena.unmap()
        view.fill_(2)
        """
    )
    assert done.returncode == 1
    assert "illegal memory access" in done.stderr


def test_pages_stay_while_an_adopter_holds_them(memory: Memory) -> None:
    owner, reader = memory.reserve("w", 256 * MIB), memory.reserve("w", 256 * MIB)
    before = free()
    owner.map()
    owner.view(0, (1,), torch.int64).fill_(5)
    reader.adopt(owner.export())
    owner.unmap()
    assert before - free() == 256 * MIB
    assert reader.view(0, (1,), torch.int64).item() == 5
    reader.unmap()
    assert free() == before


def test_a_full_gpu_is_an_error_and_leaves_nothing(memory: Memory) -> None:
    before = free()
    arena = memory.reserve("kv", before + 1024 * MIB)
    with pytest.raises(OutOfMemory, match=r"device memory: 67108864 bytes of \d+ for kv: .*OUT_OF_MEMORY") as error:
        arena.map()
    assert "try: free memory on this GPU" in str(error.value)
    assert not arena.mapped
    assert free() == before


def test_blocks_that_torch_keeps_make_way_for_pages(memory: Memory) -> None:
    """torch's allocator has a freed block of half the GPU: pages of two thirds come once it has handed it back."""
    from rollplex.backends.cuda.device import CudaDevice

    store = ObjectStore(Ledger.create("gpu0", 1 << 50, process="train0"), CudaDevice(0))
    torch.cuda.empty_cache()
    before = free()
    part = before * 2 // 3 // (64 * MIB) * 64 * MIB
    store.add([StoredObject("w", "regenerable", part, memory.reserve("w", part, cuts=(64 * MIB,)))])
    del (block := [torch.empty(before // 2, dtype=torch.uint8, device="cuda")])[0]
    assert not block
    assert free() < part
    store.map_part("w", 0, 64 * MIB, "map_part w")
    assert free() < part - 64 * MIB  # there was room: nothing is handed back
    store.map_part("w", 64 * MIB, part, "map_part w")
    assert before - free() == part
    store.close()
    assert free() == before


def test_refusals(memory: Memory) -> None:
    arena, other = memory.reserve("kv", 160 * MIB), memory.reserve("w", 64 * MIB)
    with pytest.raises(PlanError, match="kv: unmap of an arena that is not mapped"):
        arena.unmap()
    with pytest.raises(PlanError, match="kv: export of an arena without pages"):
        arena.export()
    arena.map()
    with pytest.raises(PlanError, match="kv: map of an arena that is mapped already"):
        arena.map()
    with pytest.raises(PlanError, match="w: adopt of 201326592 bytes into a range of 67108864 bytes"):
        other.adopt(arena.export())
    same = memory.reserve("kv", 160 * MIB)
    same.adopt(arena.export())
    with pytest.raises(PlanError, match="kv: export of pages that another process owns"):
        same.export()


def test_nothing_leaks_over_many_rounds(memory: Memory) -> None:
    arena, reader = memory.reserve("w", 160 * MIB), memory.reserve("w", 160 * MIB)
    view = reader.view(0, (1,), torch.int64)
    fds, before = len(os.listdir("/proc/self/fd")), free()
    for turn in range(50):
        arena.map()
        arena.view(0, (1,), torch.int64).fill_(turn)
        reader.adopt(arena.export())
        assert view.item() == turn
        reader.unmap()
        arena.unmap()
    assert (len(os.listdir("/proc/self/fd")), free()) == (fds, before)
