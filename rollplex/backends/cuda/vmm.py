"""VMM arenas: an address range reserved once, physical chunks mapped, unmapped, exported and imported behind it.

    memory = CudaMemory(device=0)
    arena = memory.reserve("actor.snapshot", nbytes)     # addresses only
    weights = arena.view(0, (64, 64), torch.bfloat16)    # valid for ever, touchable while mapped
    arena.map(); fds = arena.export(); arena.unmap()     # POSIX descriptors, for processes of this host

Graphs captured over an arena replay correctly after its pages went and came back, since addresses stay. Pages go when
the last process has let them go, imports included. An address range is given back with its process: ranges cost
nothing, and a stale view must fault instead of reading what came after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from rollplex.backends.cuda import driver as cuda
from rollplex.backends.memory.paged import Chunk, PagedArena, round_up
from rollplex.ir.errors import EngineError

CHUNK_BYTES = 256 << 20  # handles of 2 MiB cost 60 times more for each byte


class CudaArena(PagedArena):
    """`Arena` on one GPU: a chunk of pages is a handle, readable and writable by this device alone."""

    def __init__(self, name: str, nbytes: int, memory: CudaMemory, cuts: Sequence[int]) -> None:
        super().__init__(name, nbytes, memory.chunk_bytes, cuts)
        self._memory = memory
        self._d = memory.driver
        self._address = int(cuda.check(self._d.cuMemAddressReserve(nbytes, 0, 0, 0), f"a range of {nbytes} bytes"))
        self._handles: dict[Chunk, Any] = {}

    @property
    def address(self) -> int:
        return self._address

    def _make(self, chunks: Sequence[Chunk], writable: bool) -> None:
        self._memory.use()
        made: list[Chunk] = []
        try:
            for chunk in chunks:
                created = self._d.cuMemCreate(chunk.nbytes, self._memory.properties, 0)
                self._handles[chunk] = cuda.check(created, f"{chunk.nbytes} bytes of {self.nbytes} for {self.name}")
                made.append(chunk)
            self._lay(made, writable=True)
            for chunk in made:
                zeros = self._d.cuMemsetD8(self._address + chunk.start, 0, chunk.nbytes)
                cuda.check(zeros, f"zeros for {self.name}")
            # The default stream writes them, for which no other stream waits, nor a process that adopts the pages.
            torch.cuda.default_stream(self._memory.device).synchronize()
            if not writable:
                self._allow(made, writable=False)
        except BaseException:
            self._release(made)
            raise

    def _release(self, chunks: Sequence[Chunk]) -> None:
        """After all work that was given to this device, on any stream: a kernel may still read these pages."""
        self._memory.use()
        torch.cuda.synchronize(self._memory.device)
        for chunk in chunks:
            self._d.cuMemUnmap(self._address + chunk.start, chunk.nbytes)  # refused for what was never laid: well
            cuda.check(self._d.cuMemRelease(self._handles.pop(chunk)), f"release of {self.name}")

    def _hand_out(self) -> list[int]:
        kind = self._memory.shareable
        return [
            int(cuda.check(self._d.cuMemExportToShareableHandle(handle, kind, 0), f"export of {self.name}"))
            for handle in (self._handles[chunk] for chunk in self._chunks)
        ]

    def _size_of(self, fds: Sequence[int]) -> int:
        """The driver says no size of a handle: as many chunks as this range has are taken to be its chunks."""
        return self.nbytes if len(fds) == len(self._chunks) else self._memory.chunk_bytes * len(fds)

    def _take(self, fds: Sequence[int], writable: bool) -> None:
        self._memory.use()
        try:
            for chunk, fd in zip(self._chunks, fds, strict=True):
                taken = self._d.cuMemImportFromShareableHandle(fd, self._memory.shareable)
                self._handles[chunk] = cuda.check(taken, f"import for {self.name}")
            self._lay(self._chunks, writable)
        except BaseException:
            self._release(list(self._handles))
            raise

    def _lay(self, chunks: Sequence[Chunk], writable: bool) -> None:
        for chunk in chunks:
            laid = self._d.cuMemMap(self._address + chunk.start, chunk.nbytes, 0, self._handles[chunk], 0)
            cuda.check(laid, f"{chunk.nbytes} bytes of {self.name}")
        self._allow(chunks, writable)

    def _allow(self, chunks: Sequence[Chunk], writable: bool) -> None:
        """Chunks that follow each other."""
        access, at = self._memory.access(writable), self._address + chunks[0].start
        allowed = self._d.cuMemSetAccess(at, chunks[-1].stop - chunks[0].start, [access], 1)
        cuda.check(allowed, f"access to {self.name}")

    def _tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        device = torch.device("cuda", self._memory.device)
        flat = torch.empty(0, dtype=dtype, device=device)
        if 0 in shape:
            return flat.new_empty(shape)
        # The one way to a tensor over addresses that need not be mapped yet: others ask the driver what is there.
        storage = torch._C._construct_storage_from_data_pointer(self._address, device, self.nbytes)
        flat.set_(storage, offset_bytes // dtype.itemsize, torch.Size((prod(shape),)), (1,))
        return flat.view(shape)


class CudaMemory:
    """`Memory` of one GPU. EngineError where it cannot share its pages by descriptor."""

    def __init__(self, device: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.device = device
        self.driver = d = cuda.bindings()
        self.use()
        self.shareable = d.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        self._check_device()
        self.properties = d.CUmemAllocationProp()
        self.properties.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self.properties.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self.properties.location.id = device
        self.properties.requestedHandleTypes = self.shareable
        least = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._page_bytes = int(cuda.check(d.cuMemGetAllocationGranularity(self.properties, least), "page size"))
        assert chunk_bytes % self._page_bytes == 0, f"chunk_bytes {chunk_bytes} is no multiple of {self._page_bytes}"
        self.chunk_bytes = chunk_bytes

    @property
    def page_bytes(self) -> int:
        return self._page_bytes

    def use(self) -> None:
        """Make the device's context current on this thread."""
        cuda.use(self.device)

    def access(self, writable: bool) -> Any:
        """This device's access to a range."""
        d, access = self.driver, self.driver.CUmemAccessDesc()
        flags = d.CUmemAccess_flags
        access.location = self.properties.location
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE if writable else flags.CU_MEM_ACCESS_FLAGS_PROT_READ
        return access

    def reserve(self, name: str, nbytes: int, cuts: Sequence[int] = ()) -> CudaArena:
        return CudaArena(name, max(round_up(nbytes, self.page_bytes), self.page_bytes), self, cuts)

    def _check_device(self) -> None:
        attribute = self.driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
        if not int(cuda.check(self.driver.cuDeviceGetAttribute(attribute, self.device), "device attribute")):
            what = f"GPU {self.device} cannot export memory as a file descriptor: engines could not share weights"
            raise EngineError(what, hint="use another GPU, or a driver with VMM support")
