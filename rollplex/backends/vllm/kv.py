"""vLLM's keys and values in the plan's memory: what its model runner allocates for them are parts of `rollout.kv`.

vLLM 0.20 to 0.28    a buffer a layer, one behind the other
vLLM 0.29 to 0.33    one buffer, of which layers have views; in which order blocks and layers lie, it decides

All of them ask torch for zeros of bytes while the runner sets its caches up, so that is where the parts come from. They
are there from the start: captured graphs have their addresses. Between rollouts the pages are not: vLLM only counts
blocks then, and starts from none of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rollplex.ir.errors import EngineError, OutOfMemory
from rollplex.ir.sizes import pretty


@contextmanager
def lent(memory: Tensor) -> Iterator[None]:
    """Within the block vLLM's runner takes its buffers from mapped `memory` (uint8); OutOfMemory with the shortfall."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = GPUModelRunner
    original = runner.initialize_kv_cache_tensors

    def within(self: Any, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        with _Parts(memory):
            return original(self, *args, **kwargs)

    runner.initialize_kv_cache_tensors = within
    try:
        yield
    finally:
        runner.initialize_kv_cache_tensors = original


def check(runner: Any, memory: Tensor) -> None:
    """EngineError where a cache of the worker's model runner lies in other memory."""
    own = memory.untyped_storage().data_ptr()
    caches = list(_caches(runner))
    if away := sum(cache.untyped_storage().data_ptr() != own for cache in caches):
        what = f"vLLM keeps keys and values of {away} of {len(caches)} caches in memory of its own"
        raise EngineError(what, where="rollout.kv", hint="use a version that `rollplex doctor` says has run")


class _Parts(TorchFunctionMode):
    """While it is active, `torch.zeros` of bytes gives the next part of a memory."""

    def __init__(self, memory: Tensor) -> None:
        super().__init__()
        self._memory, self._at = memory, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and kwargs.get("dtype") == torch.int8:
            return self._next(*args)
        return func(*args, **kwargs)

    def _next(self, nbytes: int) -> Tensor:
        start, self._at = self._at, self._at + nbytes
        if self._at > self._memory.numel():
            what = f"vLLM's blocks take {pretty(self._at)}, the plan has {pretty(self._memory.numel())}"
            hint = "raise roles.actor.rollout.kv_cache_gib"
            raise OutOfMemory(f"{what} for keys and values", where="rollout.kv", hint=hint)
        return self._memory[start : self._at].view(torch.int8).zero_()


def _caches(runner: Any) -> Iterable[Tensor]:
    """Every tensor through which vLLM reads or writes keys and values, once."""
    found = {id(cache): cache for cache in runner.kv_caches}
    for layer in runner.compilation_config.static_forward_context.values():
        cache = getattr(layer, "kv_cache", None)
        for one in cache if isinstance(cache, list | tuple) else [cache]:
            if isinstance(one, Tensor):
                found[id(one)] = one
    return found.values()
