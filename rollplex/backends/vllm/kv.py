"""vLLM's keys and values in the plan's memory: one buffer that all layers have views of, mapped while the plan says so.

CPU    vLLM allocates its buffer when it starts, untouched; its layers are then given the same views of `rollout.kv`
GPU    its buffers are parts of `rollout.kv` from the start: captured graphs have their addresses

Between rollouts the pages are not there: vLLM only counts blocks then, and starts from none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollplex.ir.errors import EngineError, OutOfMemory
from rollplex.ir.sizes import pretty


def place(runner: Any, memory: Tensor) -> None:
    """Point every layer's cache to `memory` (uint8), at the same offsets; OutOfMemory with the shortfall.

    `runner` is the worker's model runner: its caches are tensors over one storage or, before vLLM 0.3x, over one a
    layer, which then lie one behind the other.
    """
    caches = list(_caches(runner))
    starts, at = dict[int, int](), 0
    for cache in caches:
        storage = cache.untyped_storage()
        if storage.data_ptr() not in starts:
            starts[storage.data_ptr()] = at
            at += storage.nbytes()
    if at > memory.numel():
        raise _short(at, memory)
    base = memory.untyped_storage()
    for cache in caches:
        own = starts[cache.untyped_storage().data_ptr()] + int(memory.storage_offset())
        offset = own // cache.element_size() + int(cache.storage_offset())
        cache.set_(base, offset, cache.shape, cache.stride())


@contextmanager
def lent(memory: Tensor) -> Iterator[None]:
    """Within the block vLLM's runner takes its buffers from mapped `memory` (uint8); OutOfMemory with the shortfall.

    EngineError where vLLM allocates them in another way, as later versions than 0.20 do.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    original = getattr(runner, "_allocate_kv_cache_tensors", None)
    if original is None:
        what = "this version of vLLM takes its buffers of keys and values in another way than 0.20"
        raise EngineError(what, where="vllm", hint="pip install 'vllm>=0.20,<0.21'")

    def parts(self: Any, config: Any) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        at = 0
        for one in config.kv_cache_tensors:
            if at + one.size > memory.numel():
                raise _short(at + one.size, memory)
            found |= dict.fromkeys(one.shared_by, memory[at : at + one.size].view(torch.int8))
            at += one.size
        memory.zero_()
        return found

    runner._allocate_kv_cache_tensors = parts
    try:
        yield
    finally:
        runner._allocate_kv_cache_tensors = original


def _short(need: int, memory: Tensor) -> OutOfMemory:
    what = f"vLLM's blocks take {pretty(need)}, the plan has {pretty(memory.numel())} for keys and values"
    return OutOfMemory(what, where="rollout.kv", hint="raise roles.actor.rollout.kv_cache_gib")


def _caches(runner: Any) -> Iterable[Tensor]:
    """Every tensor through which vLLM reads or writes keys and values, once."""
    found = {id(cache): cache for cache in runner.kv_caches}
    for layer in runner.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        for one in cache if isinstance(cache, list | tuple) else [cache]:
            if isinstance(one, Tensor):
                found[id(one)] = one
    return found.values()
