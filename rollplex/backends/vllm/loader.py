"""vLLM's load format `rollplex`: the model is built without weights, then bound to pages that others have filled.

build      linear and embedding weights on the meta device, what is small in its place; buffers (RoPE tables) are real
process    what vLLM does to loaded weights, while there are none: a CPU keeps the natural GEMM instead of packing
bind       every parameter becomes a view of the shard or the tower; none is left over, none is bound twice

It happens before vLLM profiles, compiles or captures anything, so that strides and addresses are final by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers import vocab_parallel_embedding
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from rollplex.backends.facts import Block
from rollplex.backends.rollout.sampler import Served
from rollplex.backends.shard import Region
from rollplex.backends.vllm.layers import GateAndUp, PairedActivation, ReorderedQkv, pairs_of
from rollplex.backends.vllm.names import parameters
from rollplex.ir.errors import EngineError

FORMAT = "rollplex"
_serving: list[tuple[Served, Mapping[str, tuple[Block, ...]], int]] = []


@contextmanager
def serving(served: Served, own_rows: Mapping[str, tuple[Block, ...]], vocab_rows: int) -> Iterator[None]:
    """Within the block, models of the format are bound to `served`.

    `own_rows` are the rows of vLLM's fused weights (`qkv`, `gate_up`) on this rank as it reads them by itself,
    `vocab_rows` those of embedding and head on all ranks together.
    """
    _serving.append((served, own_rows, vocab_rows))
    try:
        yield
    finally:
        _serving.pop()


@register_model_loader(FORMAT)
class SharedPagesLoader(BaseModelLoader):
    """A loader that copies nothing."""

    def download_model(self, model_config: Any) -> None:
        """There are no files."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        raise EngineError("weights of this engine are pages of the trainer", where="vllm", hint="publish new ones")

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> nn.Module:
        """The model over what is being served."""
        served, own_rows, vocab_rows = _serving[-1]
        device = served.snapshot.device
        with set_default_torch_dtype(model_config.dtype), device, _weightless(vocab_rows):
            model = initialize_model(vllm_config, model_config=model_config, prefix=prefix)
        split_tower(model)
        process_weights_after_loading(model, model_config, device)
        bind(model, parameters(served))
        reindex(model, served.shard.regions, own_rows, device)
        return model.eval()


@contextmanager
def _weightless(vocab_rows: int) -> Iterator[None]:
    """Weights that layers create lie on the meta device, and the vocabulary has the plan's rows."""
    methods: tuple[Any, ...] = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    create, pad = [m.create_weights for m in methods], vocab_parallel_embedding.pad_vocab_size
    for method, original in zip(methods, create, strict=True):
        method.create_weights = _on_meta(original)
    vocab_parallel_embedding.pad_vocab_size = lambda vocab, to=0: vocab_rows
    try:
        yield
    finally:
        for method, original in zip(methods, create, strict=True):
            method.create_weights = original
        vocab_parallel_embedding.pad_vocab_size = pad


def _on_meta(create: Any) -> Any:
    def created(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            create(self, *args, **kwargs)

    return created


def split_tower(model: Any) -> None:
    """Gate and up of the tower become two parameters, as they lie."""
    for block in model.visual.blocks if hasattr(model, "visual") else ():
        block.mlp.gate_up_proj = GateAndUp(block.mlp.gate_up_proj)


def bind(model: nn.Module, views: Mapping[str, Tensor]) -> None:
    """Make every parameter a view, shared ones too; EngineError names one that is missing, left over or odd."""
    wanted = dict(model.named_parameters())
    if odd := sorted(wanted.keys() ^ views.keys()):
        raise EngineError(f"vLLM has other parameters than the plan: {', '.join(odd[:5])}", where="vllm", hint=_HINT)
    made: dict[int, nn.Parameter] = {}
    for name, old in wanted.items():
        view = views[name]
        if (view.shape, view.dtype) != (old.shape, old.dtype):
            what = f"{name} is {list(old.shape)} {old.dtype} in vLLM, {list(view.shape)} {view.dtype} in the plan"
            raise EngineError(what, where="vllm", hint=_HINT)
        made[id(old)] = nn.Parameter(view, requires_grad=False)
    for module in model.modules():
        for leaf, old in module._parameters.items():
            if old is not None:
                module._parameters[leaf] = made[id(old)]


_HINT = "this version of vLLM builds the model in another way: use one that `rollplex doctor` says has run"


def reindex(
    model: Any, regions: tuple[Region, ...], own_rows: Mapping[str, tuple[Block, ...]], device: torch.device
) -> None:
    """Teach the layers whose fused weights lie in the trainer's order to read them so."""
    rows = {r.name: r.rows for r in regions if r.blocks and r.name.endswith(".weight")}
    language = getattr(model, "language_model", model).model
    reordered = partial(ReorderedQkv, want=own_rows["qkv"], device=device)
    for number, layer in enumerate(language.layers):
        qkv, gate_up = rows[f"layers.{number}.self_attn.qkv.weight"], rows[f"layers.{number}.mlp.gate_up.weight"]
        if _merged(qkv) != _merged(own_rows["qkv"]):
            layer.self_attn.qkv_proj = reordered(layer.self_attn.qkv_proj, have=qkv)
        if _merged(gate_up) != _merged(own_rows["gate_up"]):
            layer.mlp.act_fn = PairedActivation(layer.mlp.act_fn, pairs_of(gate_up))


def _merged(rows: tuple[Block, ...]) -> list[Block]:
    """Neighbouring blocks of one part as one: slabs of several ranks may be rows in order."""
    found: list[Block] = []
    for b in rows:
        if found and (found[-1].part, found[-1].stop) == (b.part, b.start):
            found[-1] = Block(b.part, found[-1].start, b.stop)
        else:
            found.append(b)
    return found
