"""What a call of one of cuDNN's graphs hands over, by a frontend that only writes it down; needs no GPU.

graph    q, k, v, out, lse, and how many tokens there are
call     a tensor for the number of each, a workspace, the stream
"""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollplex.backends.cuda import graphs, launch
from rollplex.backends.cuda.graphs import Graph, Layout

HEADS, KV_HEADS, D = 4, 2, 8
CPU = torch.device("cpu")


class Named:
    """A tensor of a graph."""

    def __init__(self, uid: int) -> None:
        self.uid = uid

    def get_uid(self) -> int:
        return self.uid

    def set_ragged_offset(self, _: Any) -> Named:
        return self

    set_output = set_dim = set_stride = set_data_type = set_ragged_offset


class Written:
    """A graph that writes down what it is to execute."""

    workspace = 0

    def __init__(self, **_: Any) -> None:
        self.uids = iter(range(100, 200))
        self.calls: list[tuple[dict[int, torch.Tensor], torch.Tensor]] = []

    def tensor(self, **_: Any) -> Named:
        return Named(next(self.uids))

    def sdpa(self, **_: Any) -> tuple[Named, Named]:
        return self.tensor(), self.tensor()

    def get_workspace_size(self) -> int:
        return self.workspace

    def execute(self, values: dict[int, torch.Tensor], workspace: torch.Tensor, handle: str) -> None:
        assert handle == "handle"
        self.calls.append((values, workspace))

    def create_execution_plans(self, _: Any) -> None:
        pass

    def validate(self) -> None:
        pass

    build_operation_graph = check_support = build_plans = validate


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The streams that cuDNN is told of."""
    told: list[int] = []
    types, modes = SimpleNamespace(BFLOAT16=0, HALF=1, FLOAT=2, INT32=3, INT64=4), SimpleNamespace(A=0, FALLBACK=1)
    frontend = SimpleNamespace(
        data_type=types, heur_mode=modes, pygraph=Written, set_stream=lambda handle, stream: told.append(stream)
    )
    monkeypatch.setattr(graphs, "_cudnn", lambda: frontend)
    monkeypatch.setattr(graphs, "handle", lambda _: "handle")
    monkeypatch.setattr(graphs, "on", lambda _: nullcontext())
    current = iter(range(7, 100))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=next(current)))
    return told


def made(slot: bool) -> Graph:
    layout = Layout(HEADS, KV_HEADS, D, 1024, 1024, slot, torch.bfloat16, 0.5)
    return graphs.forward_graph.__wrapped__(layout, CPU)


def given() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(1) for name in ("q", "k", "v", "out", "lse")}


@pytest.mark.parametrize("slot", [False, True])
def test_tensors_are_handed_over_by_number_and_counts_are_made_once(streams: list[int], slot: bool) -> None:
    graph, first, second = made(slot), given(), given()
    graph.run(5, 9, first)
    graph.run(5, 9, second)
    (one, room), (two, same_room) = graph.graph.calls
    assert streams == [7, 8]
    assert room is same_room
    for tensors, values in ((first, one), (second, two)):
        assert all(values.pop(graph.tensors[name].uid) is x for name, x in tensors.items())
    assert all(two[number] is x for number, x in one.items())
    wanted = {"of_queries": [5], "of_keys": [9], "at_q": [0, 5 * HEADS * D]}
    wanted |= {} if slot else {"at_k": [0, 9 * KV_HEADS * D]}
    numbers = {name: graph.tensors[name].uid for name in wanted}
    assert {name: one[number].tolist() for name, number in numbers.items()} == wanted
    assert one.keys() == two.keys() == set(numbers.values())


def test_a_workspace_is_the_callers_for_one_call(streams: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be as large as a plan says that sums are, and is given back."""
    monkeypatch.setattr(Written, "workspace", 4096)
    asked: list[int] = []
    empty = torch.empty

    def noted(n: int, **how: Any) -> torch.Tensor:
        asked.append(n)
        return empty(n, **how)

    graph = made(slot=True)
    monkeypatch.setattr(torch, "empty", noted)
    graph.run(3, 4, given())
    graph.run(3, 4, given())
    assert asked == [4096, 4096]


def test_a_device_is_entered_where_it_is_not_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    here, there = (launch.on(torch.device("cuda", i)) for i in (1, 0))
    assert isinstance(here, nullcontext)
    assert isinstance(there, torch.cuda.device)
    assert there.idx == 0
