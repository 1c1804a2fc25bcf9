"""Host memory that copies of a GPU reach at the link's full rate: pages locked by the driver, where they are.

The pool is the host's (memory/pinned.py): one arena for each stretch of addresses. Registering takes about half a
second a GiB, so it is done once, and torch's pinned allocator, which rounds up to powers of two, is not used.
"""

from __future__ import annotations

import weakref

from rollplex.backends.base import Arena
from rollplex.backends.cuda import driver as cuda


def register(arena: Arena, device: int) -> None:
    """Lock a mapped host arena's pages for the device until the arena is gone; OutOfMemory if the kernel will not."""
    d = cuda.bindings()
    cuda.use(device)
    what = f"{arena.nbytes} bytes of host memory for {arena.name}, to be pinned"
    cuda.check(d.cuMemHostRegister(arena.address, arena.nbytes, d.CU_MEMHOSTREGISTER_PORTABLE), what)
    weakref.finalize(arena, d.cuMemHostUnregister, arena.address)
