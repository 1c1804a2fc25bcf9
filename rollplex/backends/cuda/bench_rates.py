"""Rates of one GPU with nothing beside it: linear layers, attention, HBM, the host link, memory management.

Each is the median of a few repeats, timed by events where kernels are timed, by the clock where the driver is.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from rollplex.backends.cuda import driver as cuda
from rollplex.backends.cuda.proxy import Proxy, RankShape
from rollplex.backends.cuda.vmm import CudaMemory

REPEATS = 5
COPY_BYTES = 1 << 30
GIB = 1 << 30
HANDLE_BYTES = 256 << 20


def gemm_tflops(proxy: Proxy, tokens: int) -> float:
    """TFLOP/s of a layer's linears on so many tokens."""
    inputs, layers = proxy.inputs(tokens), proxy.ring

    def all_layers() -> None:
        for layer in range(layers):
            proxy.linears(layer, inputs)

    return layers * tokens * proxy.shape.layer_flops / timed(all_layers) / 1e12


def attention_tflops(shape: RankShape, device: torch.device, tokens: int) -> float:
    """TFLOP/s of causal attention over so many tokens."""
    sizes = [(1, heads, tokens, shape.head_dim) for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
    q, k, v = (torch.randn(size, dtype=shape.dtype, device=device) for size in sizes)
    took = timed(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
    return shape.attention_flops(tokens) / took / 1e12


def hbm_gb_s(device: torch.device) -> float:
    """GB/s that a copy inside HBM reads and writes."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / timed(lambda: target.copy_(source)) / 1e9


def link_gb_s(device: torch.device) -> dict[str, float]:
    """GB/s of pinned copies: to the device, to the host, each way while both are busy."""
    host = [torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
    card = [torch.empty(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)]
    streams = [torch.cuda.Stream(device) for _ in range(2)]

    def both() -> None:
        current = torch.cuda.current_stream(device)
        for stream in streams:
            stream.wait_stream(current)
        with torch.cuda.stream(streams[0]):
            card[0].copy_(host[0], non_blocking=True)
        with torch.cuda.stream(streams[1]):
            host[1].copy_(card[1], non_blocking=True)
        for stream in streams:
            current.wait_stream(stream)

    to_device = timed(lambda: card[0].copy_(host[0], non_blocking=True))
    to_host = timed(lambda: host[1].copy_(card[1], non_blocking=True))
    found = {"to_device_gb_s": to_device, "to_host_gb_s": to_host, "both_gb_s": timed(both)}
    return {name: COPY_BYTES / seconds / 1e9 for name, seconds in found.items()}


def pages_s(device: int) -> dict[str, float]:
    """Seconds a GiB, in handles as arenas have them: pages made, laid and let go; host memory registered."""
    memory = CudaMemory(device, HANDLE_BYTES)
    rounds = [_pages(memory.driver, memory) for _ in range(REPEATS)]
    found = {name: median(r[name] for r in rounds) for name in rounds[0]}
    return found | {"pin_s": median(_pin(memory.driver) for _ in range(2))}


def _pages(d: Any, memory: CudaMemory) -> dict[str, float]:
    marks, address = [time.perf_counter()], int(cuda.check(d.cuMemAddressReserve(GIB, 0, 0, 0), "a range of 1 GiB"))
    handles = [
        cuda.check(d.cuMemCreate(HANDLE_BYTES, memory.properties, 0), "pages") for _ in range(GIB // HANDLE_BYTES)
    ]
    marks.append(time.perf_counter())
    for i, handle in enumerate(handles):
        cuda.check(d.cuMemMap(address + i * HANDLE_BYTES, HANDLE_BYTES, 0, handle, 0), "pages behind a range")
    cuda.check(d.cuMemSetAccess(address, GIB, [memory.access(True)], 1), "access to a range")
    marks.append(time.perf_counter())
    for i, handle in enumerate(handles):
        cuda.check(d.cuMemUnmap(address + i * HANDLE_BYTES, HANDLE_BYTES), "pages let go")
        cuda.check(d.cuMemRelease(handle), "pages released")
    marks.append(time.perf_counter())
    cuda.check(d.cuMemAddressFree(address, GIB), "a range given back")
    create, laid, gone = (b - a for a, b in pairwise(marks))
    return {"create_s": create, "map_s": laid, "unmap_s": gone}


def _pin(d: Any) -> float:
    with mmap.mmap(-1, GIB) as pages:
        buffer = torch.frombuffer(pages, dtype=torch.uint8)
        began = time.perf_counter()
        cuda.check(d.cuMemHostRegister(buffer.data_ptr(), GIB, d.CU_MEMHOSTREGISTER_PORTABLE), "1 GiB to be pinned")
        took = time.perf_counter() - began
        cuda.check(d.cuMemHostUnregister(buffer.data_ptr()), "pinned memory let go")
        del buffer
        return took


def timed(work: Callable[[], object]) -> float:
    """Seconds of work on the current stream: the median of a few repeats, behind one that warms up."""
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPEATS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return median(a.elapsed_time(b) for a, b in pairwise(marks)) / 1e3
