"""What vLLM's runner allocates for keys and values lies in the memory that is lent to it, in whichever form.

    0.20 to 0.28    [ layer 0: b0 b1 .. | layer 1: b0 b1 .. ]      a buffer a layer
    0.29 to 0.33    the same, or [ b0: layer 0, layer 1 | .. ]     one buffer

The forms are played by runners of a few lines; that of the installed vLLM is its own function on tensors of a CPU.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm_tiny import needs_vllm

from rollplex.backends.vllm.kv import check, lent
from rollplex.ir.errors import EngineError, OutOfMemory

LAYERS, BLOCKS, PAGE = 3, 4, 64


class Layered:
    """A buffer a layer."""

    def initialize_kv_cache_tensors(self, kv_cache_config: int, kernel_block_sizes: list[int]) -> dict[str, Tensor]:
        self.counts = torch.zeros(5, dtype=torch.int32)
        buffers = [torch.zeros(kv_cache_config, dtype=torch.int8, device="cpu") for _ in range(LAYERS)]
        return {f"layers.{n}": buffer.view(torch.bfloat16).view(BLOCKS, -1) for n, buffer in enumerate(buffers)}


class Packed:
    """One buffer, blocks outermost."""

    def initialize_kv_cache_tensors(self, kv_cache_config: int, kernel_block_sizes: list[int]) -> dict[str, Tensor]:
        self.counts = torch.zeros(5, dtype=torch.int32)
        buffer = torch.zeros(LAYERS * kv_cache_config, dtype=torch.int8, device="cpu")
        blocks = buffer.view(torch.bfloat16).view(BLOCKS, LAYERS, -1)
        return {f"layers.{n}": blocks[:, n] for n in range(LAYERS)}


class Layer:
    """An attention layer, as vLLM hands a cache to it."""

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache


@pytest.fixture(params=[Layered, Packed])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner's class in the place of vLLM's."""
    module = SimpleNamespace(GPUModelRunner=request.param)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", module)
    return request.param


def test_caches_of_either_form_are_all_of_the_memory_once(form: Any) -> None:
    """Each byte belongs to one block of one layer, and was made zero."""
    memory = torch.full((LAYERS * BLOCKS * PAGE + 100,), 7, dtype=torch.uint8)
    with lent(memory):
        runner = form()
        caches = runner.initialize_kv_cache_tensors(BLOCKS * PAGE, [16])
    assert not memory[:-100].any()
    assert (memory[-100:] == 7).all()
    for number, cache in enumerate(caches.values(), start=1):
        cache.view(torch.int16).fill_(257 * number)
    assert sorted(memory[:-100].tolist()) == sorted([n for n in range(1, LAYERS + 1) for _ in range(BLOCKS * PAGE)])
    assert runner.counts.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr()


def test_a_second_runner_takes_the_memory_from_its_start(form: Any) -> None:
    memory = torch.zeros(LAYERS * BLOCKS * PAGE, dtype=torch.uint8)
    with lent(memory):
        first, second = (form().initialize_kv_cache_tensors(BLOCKS * PAGE, [16]) for _ in range(2))
    assert [c.data_ptr() for c in first.values()] == [c.data_ptr() for c in second.values()]


def test_behind_the_block_a_runner_has_memory_of_its_own(form: Any) -> None:
    memory = torch.zeros(LAYERS * BLOCKS * PAGE, dtype=torch.uint8)
    with lent(memory):
        pass
    caches = form().initialize_kv_cache_tensors(BLOCKS * PAGE, [16])
    assert all(c.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr() for c in caches.values())


def test_blocks_that_are_larger_than_the_planned_memory_are_refused(form: Any) -> None:
    refused = pytest.raises(OutOfMemory, match=r"vLLM's blocks take .*, the plan has 1.0 KiB for keys and values")
    with refused, lent(torch.zeros(1024, dtype=torch.uint8)):
        form().initialize_kv_cache_tensors(1536, [16])


def test_caches_in_other_memory_are_refused() -> None:
    """A runner that allocates in a way that nobody has read yet."""
    memory = torch.zeros(1024, dtype=torch.uint8)
    layers = {"0": SimpleNamespace(kv_cache=[memory[:512]]), "1": SimpleNamespace(kv_cache=torch.zeros(4))}
    runner = SimpleNamespace(kv_caches=[], compilation_config=SimpleNamespace(static_forward_context=layers))
    with pytest.raises(EngineError, match="vLLM keeps keys and values of 1 of 2 caches in memory of its own"):
        check(runner, memory)
    layers["1"].kv_cache = memory[512:]
    check(runner, memory)


class TestOfTheInstalledVersion:
    """Its own function, with a runner that has what that reads; layouts that engines on GPUs choose among."""

    pytestmark = needs_vllm

    @pytest.mark.parametrize(("layout", "strides"), [("LBNHC", (BLOCKS, 1)), ("BLNHC", (1, LAYERS))])
    def test_every_block_of_every_layer_is_where_its_strides_say(self, layout: str, strides: tuple[int, int]) -> None:
        names = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
        memory, page = self._lent(layout, strides, {"full": names})
        for n in range(LAYERS):
            for b in range(BLOCKS):
                start = page * (strides[0] * n + strides[1] * b)
                assert memory[start : start + page].unique().tolist() == [1 + n * BLOCKS + b]
        assert not memory[page * LAYERS * BLOCKS :].any()

    def test_groups_of_layers_lie_over_each_other(self) -> None:
        """Layers with a window and those without have block tables of their own over the same bytes."""
        names = {"full": ["model.layers.0.self_attn.attn"], "window": ["model.layers.1.self_attn.attn"]}
        memory, page = self._lent("LBNHC", (BLOCKS, 1), names)
        blocks = memory[: page * BLOCKS].view(BLOCKS, page)
        assert [b.unique().tolist() for b in blocks] == [[1 + BLOCKS + b] for b in range(BLOCKS)]
        assert not memory[page * BLOCKS :].any()

    def _lent(self, layout: str, strides: tuple[int, int], groups: dict[str, list[str]]) -> tuple[Tensor, int]:
        """Memory of which every block is filled with a number through its layer's cache, and the bytes of a block."""
        from vllm.v1 import kv_cache_interface as of
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        shape: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.bfloat16}
        specs: dict[str, Any] = {"full": of.FullAttentionSpec(**shape)}
        specs["window"] = of.SlidingWindowSpec(**shape, sliding_window=64)
        page = specs["full"].page_size_bytes
        size = page * BLOCKS * max(len(names) for names in groups.values())
        tensors = [of.KVCacheTensor(size, names, page * strides[0], page * strides[1]) for names in groups.values()]
        config = of.KVCacheConfig(BLOCKS, tensors, [of.KVCacheGroupSpec(n, specs[kind]) for kind, n in groups.items()])
        layers = {name: Layer() for names in groups.values() for name in names}
        runner: Any = SimpleNamespace(
            device=torch.device("cpu"),
            cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout]),
            shared_kv_cache_layers={},
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2_5_vl")),
            attn_groups=[],
            speculative_config=None,
            compilation_config=SimpleNamespace(static_forward_context=layers),
            kv_caches=[],
        )
        memory = torch.full((size + 4096,), 9, dtype=torch.uint8)
        memory[size:] = 0
        with lent(memory):
            GPUModelRunner.initialize_kv_cache_tensors(runner, config, [16] * len(groups))
        check(runner, memory)
        for n, layer in enumerate(layers.values()):
            for b in range(BLOCKS):
                layer.kv_cache[b].view(torch.int16).fill_(257 * (1 + n * BLOCKS + b))
        return memory, page
