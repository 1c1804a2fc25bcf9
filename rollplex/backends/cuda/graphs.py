"""cuDNN's attention graphs: made for so many tokens of room, they read from the GPU how many there are.

graph = forward_graph(Layout.of(query, key, scale, slot=False), device)                                made once
graph.run(6000, 6000, {"q": query, "k": key, "v": value, "out": out, "lse": lse})               any length up to 6144

Queries lie packed [t, heads, d]; keys too, or in a slot [kv_heads, room, d]. A graph takes a second to make.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollplex.backends.attention_sums import room
from rollplex.backends.cuda.launch import on
from rollplex.ir.errors import EngineError


class Layout(NamedTuple):
    """What a graph is made for; `slot` says that keys lie head by head, with room behind them, not token by token."""

    heads: int
    kv_heads: int
    d: int
    queries: int
    keys: int
    slot: bool
    dtype: torch.dtype
    scale: float

    @classmethod
    def of(cls, query: Tensor, key: Tensor, scale: float, slot: bool) -> Layout:
        """Of query [t, heads, d] and key [t, kv_heads, d], or [kv_heads, p, d] of a slot."""
        t, heads, d = query.shape
        kv_heads, keys = (key.shape[0], max(key.stride(0) // d, key.shape[1])) if slot else (key.shape[1], room(t))
        return cls(heads, kv_heads, d, room(t), keys, slot, query.dtype, scale)


class Graph:
    """One of cuDNN's graphs, and its tensors by name: sizes are those of the room, lengths are data."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        cudnn = _cudnn()
        self._device, self._handle, self._types = device, handle(device), cudnn.data_type
        self._io = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[layout.dtype]
        single = cudnn.data_type.FLOAT
        self.graph: Any = cudnn.pygraph(
            io_data_type=self._io, intermediate_data_type=single, compute_data_type=single, handle=self._handle
        )
        self.tensors: dict[str, Any] = {}
        self._layout = layout
        for name, kind, n in (
            ("of_queries", "INT32", 1),
            ("of_keys", "INT32", 1),
            ("at_q", "INT64", 2),
            ("at_k", "INT64", 2),
        ):
            self._tensor(name, [n, 1, 1, 1], [1, 1, 1, 1], getattr(cudnn.data_type, kind))

    def _tensor(self, name: str, dim: list[int], stride: list[int], kind: Any) -> Any:
        found = self.tensors[name] = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)
        return found

    def queries(self, name: str) -> Any:
        """A given tensor like the queries."""
        return self._placed(self._tensor(name, *self._of_queries, self._io), "at_q")

    def keys(self, name: str) -> Any:
        """A given tensor like the keys."""
        return self._placed(self._tensor(name, *self._of_keys, self._io), "at_k")

    def rows(self, name: str) -> Any:
        """A given number for each row."""
        return self._tensor(name, *self._of_rows, self._types.FLOAT)

    def make(self, **outputs: tuple[Any, str]) -> Graph:
        """The outputs by name, each with what it is like; then the graph is made."""
        for name, (tensor, like) in outputs.items():
            dim, stride = {"queries": self._of_queries, "keys": self._of_keys, "rows": self._of_rows}[like]
            kind = self._types.FLOAT if like == "rows" else self._io
            tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
            if like != "rows":
                self._placed(tensor, "at_q" if like == "queries" else "at_k")
            self.tensors[name] = tensor
        if self._layout.slot:
            del self.tensors["at_k"]
        modes = _cudnn().heur_mode
        with on(self._device):
            self.graph.validate()
            self.graph.build_operation_graph()
            self.graph.create_execution_plans([modes.A, modes.FALLBACK])
            self.graph.check_support()
            self.graph.build_plans()
        self._numbers = {name: tensor.get_uid() for name, tensor in self.tensors.items()}
        self._counted = lru_cache(maxsize=32)(self._counts)
        self._workspace: int = self.graph.get_workspace_size()
        self._none = torch.empty(1, dtype=torch.uint8, device=self._device)
        return self

    def run(self, queries: int, keys: int, given: dict[str, Tensor]) -> None:
        """On the current stream, for so many tokens.

        The stream is told each time: the current one of a green context, and the one outside it, may both be number 0.
        """
        values = self._counted(queries, keys) | {self._numbers[name]: x for name, x in given.items()}
        room = torch.empty(self._workspace, dtype=torch.uint8, device=self._device) if self._workspace else self._none
        _cudnn().set_stream(handle=self._handle, stream=torch.cuda.current_stream(self._device).cuda_stream)
        with on(self._device):
            self.graph.execute(values, room, handle=self._handle)

    def _counts(self, queries: int, keys: int) -> dict[int, Tensor]:
        """What says how many tokens there are, by number; every layer of a step asks again."""
        values = _lengths(queries, keys, self._layout, self._device)
        return {self._numbers[name]: x for name, x in values.items() if name in self._numbers}

    @property
    def masked(self) -> dict[str, Any]:
        """What a row may see."""
        lengths = {"seq_len_q": self.tensors["of_queries"], "seq_len_kv": self.tensors["of_keys"]}
        seen = {} if self._layout.slot else {"use_causal_mask": True}
        return {"attn_scale": self._layout.scale, "use_padding_mask": True, **lengths, **seen}

    def _placed(self, tensor: Any, at: str) -> Any:
        """Tokens are packed, but for those of a slot."""
        if not (self._layout.slot and at == "at_k"):
            tensor.set_ragged_offset(self.tensors[at])
        return tensor

    @property
    def _of_queries(self) -> tuple[list[int], list[int]]:
        n = self._layout
        return [1, n.heads, n.queries, n.d], [n.heads * n.queries * n.d, n.d, n.heads * n.d, 1]

    @property
    def _of_keys(self) -> tuple[list[int], list[int]]:
        n = self._layout
        stride = [n.keys * n.d, n.d] if n.slot else [n.d, n.kv_heads * n.d]
        return [1, n.kv_heads, n.keys, n.d], [n.kv_heads * n.keys * n.d, *stride, 1]

    @property
    def _of_rows(self) -> tuple[list[int], list[int]]:
        n = self._layout
        return [1, n.heads, n.queries, 1], [n.heads * n.queries, n.queries, 1, 1]


@lru_cache(maxsize=64)
def forward_graph(layout: Layout, device: torch.device) -> Graph:
    made = Graph(layout, device)
    q, k, v = made.queries("q"), made.keys("k"), made.keys("v")
    out, lse = made.graph.sdpa(name="attention", q=q, k=k, v=v, generate_stats=True, **made.masked)
    return made.make(out=(out, "queries"), lse=(lse, "rows"))


@lru_cache(maxsize=64)
def backward_graph(layout: Layout, device: torch.device) -> Graph:
    made = Graph(layout, device)
    q, k, v = made.queries("q"), made.keys("k"), made.keys("v")
    dq, dk, dv = made.graph.sdpa_backward(
        name="attention", q=q, k=k, v=v, o=made.queries("out"), dO=made.queries("grad"), stats=made.rows("lse"),
        use_deterministic_algorithm=True, **made.masked,
    )  # fmt: skip
    return made.make(dq=(dq, "queries"), dk=(dk, "keys"), dv=(dv, "keys"))


@lru_cache(maxsize=32)
def _lengths(queries: int, keys: int, layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """How many tokens there are, and where packed ones begin and end, in elements; graphs share them."""
    ends = torch.tensor([0, queries * layout.heads * layout.d, 0, keys * layout.kv_heads * layout.d]).to(device)
    counts = torch.tensor([queries, keys], dtype=torch.int32).to(device)
    return {"of_queries": counts[:1], "of_keys": counts[1:], "at_q": ends[:2], "at_k": ends[2:]}


@lru_cache(maxsize=8)
def handle(device: torch.device) -> Any:
    """cuDNN's of a GPU; EngineError where its frontend is not installed."""
    with on(device):
        return _cudnn().create_handle()


@lru_cache(maxsize=1)
def _cudnn() -> Any:
    """The frontend, which is there where a GPU is."""
    try:
        return import_module("cudnn")
    except ImportError as err:
        what, hint = f"cuDNN's graphs cannot be made: {err}", "install rollplex[cuda]: it has nvidia-cudnn-frontend"
        raise EngineError(what, where="cudnn", hint=hint) from None
