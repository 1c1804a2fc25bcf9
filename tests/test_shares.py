"""Shares of the flat parameters: they tile them, and what their owners update is what one rank would have updated.

flat order   |p0......|p1..|p2..........|      one rank      [ all                     )
                                               three ranks   [ 0      )[ 1      )[ 2   )
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optimizer import named, sizes_strategy
from torch import Tensor

from rollplex.backends.collectives import Groups
from rollplex.backends.engine import TrainedState
from rollplex.backends.memory.host import HostDevice
from rollplex.backends.publication import Publication
from rollplex.backends.training.shares import Shares, joined, parts, shares_of
from rollplex.ir.job_schema import Optimizer
from rollplex.ir.steps import Publish, UpdateChunk
from rollplex.runtime.update import StreamedUpdate

torch.set_num_threads(1)
ranks_strategy = st.integers(1, 4)


@given(numel=st.integers(1, 200), ranks=ranks_strategy)
def test_shares_tile_the_parameters_and_are_as_long_as_the_plan_says(numel: int, ranks: int) -> None:
    shares = shares_of(numel, ranks)
    assert [i for share in shares for i in share] == list(range(numel))
    assert len(shares) == ranks
    assert max(map(len, shares)) == -(-numel // ranks)


@given(sizes=sizes_strategy, ranks=ranks_strategy, order=st.permutations(range(6)))
def test_what_is_sent_around_is_every_element_once_wherever_it_lies(
    sizes: list[int], ranks: int, order: list[int]
) -> None:
    """Parameters lie in memory in another order than in the flat one; each owner's value arrives everywhere."""
    numel, memory = sum(sizes), torch.full((sum(sizes),), -1.0)
    places = [i for i in order if i < len(sizes)]
    starts = {i: sum(sizes[j] for j in places[: places.index(i)]) for i in places}
    weights = {f"p{i}": memory[starts[i] : starts[i] + size] for i, size in enumerate(sizes)}
    for owner, share in enumerate(shares_of(numel, ranks)):
        for run in joined(named(sizes), weights, share):
            assert (run == -1.0).all()
            run.fill_(owner)
    flat = torch.cat([weights[name] for name, _ in named(sizes)])
    assert flat.tolist() == [owner for owner, share in enumerate(shares_of(numel, ranks)) for _ in share]


def test_neighbours_in_memory_are_sent_together() -> None:
    memory = torch.zeros(12)
    weights = {"a": memory[:4].view(2, 2), "b": memory[4:8], "c": memory[8:]}
    sizes = [("a", 4), ("b", 4), ("c", 4)]
    assert [run.numel() for run in joined(sizes, weights, range(2, 11))] == [9]
    assert [run.numel() for run in joined([("a", 4), ("c", 4), ("b", 4)], weights, range(2, 11))] == [2, 4, 3]


@given(sizes=sizes_strategy, ranks=ranks_strategy)
def test_a_share_has_the_initial_values_of_its_elements(sizes: list[int], ranks: int) -> None:
    numel = sum(sizes)
    want = torch.arange(numel, dtype=torch.float64)
    starts = {name: sum(sizes[: int(name[1:])]) for name, _ in named(sizes)}

    def fill(into: Mapping[str, Tensor]) -> None:
        for name, whole in into.items():
            assert whole.numel() == dict(named(sizes))[name]
            whole.copy_(want[starts[name] : starts[name] + whole.numel()])

    for rank, share in enumerate(shares_of(numel, ranks)):
        flat = torch.full((len(share),), -1.0, dtype=torch.float64)
        Shares.of(Groups(rank, {"dp": tuple(range(ranks))}), named(sizes), cut=True).fill(flat, fill)
        assert torch.equal(flat, want[share.start : share.stop])


class Rank:
    """One rank's state: the share of master and moments, all gradients, all weights."""

    def __init__(self, sizes: list[int], share: range, in_flight: int, chunk: int, longest: int) -> None:
        names, numel = named(sizes), sum(sizes)
        master = torch.linspace(-1, 1, numel)[share.start : share.stop].clone()
        self.held = {"master": master, "moments": torch.zeros(2 * len(share)), "gradients": torch.zeros(numel)}
        self.weights = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in names}
        trained = TrainedState(
            "actor", "", tuple(names), share, torch.float32, self.weights, self.held.__getitem__, frozenset({"p1"}),
            frozenset(), lambda own: [own], Publication(None), HostDevice(), lambda tell: nullcontext(),
            lambda op, elements: None,
        )  # fmt: skip
        starts = range(0, longest, chunk)
        streams = ("actor.gradients", "actor.master", "actor.moments")
        self.steps = [
            UpdateChunk(window="P3", role="actor", index=i, start=s, stop=min(s + chunk, longest), streams=streams)
            for i, s in enumerate(starts)
        ]
        options = Optimizer(lr=1e-2, weight_decay=0.1, in_flight=in_flight)
        self.update = StreamedUpdate(options, trained, self.steps)

    def step(self, number: int) -> None:
        rng = torch.Generator().manual_seed(number)
        self.held["gradients"].copy_(torch.randn(self.held["gradients"].shape, generator=rng))
        for step in self.steps:
            self.update.chunk(step)
        self.update.publish(Publish(window="P3", object="actor.snapshot"))


@given(sizes=sizes_strategy, ranks=ranks_strategy, in_flight=st.integers(1, 3), chunk=st.integers(1, 60))
@settings(max_examples=40, deadline=None)
def test_owners_update_to_the_bit_what_one_rank_would(sizes: list[int], ranks: int, in_flight: int, chunk: int) -> None:
    """Two updates with weight decay groups; every rank runs the plan's chunks, made for the longest share."""
    numel = sum(sizes)
    shares = shares_of(numel, ranks)
    alone = Rank(sizes, range(numel), in_flight, chunk, numel)
    owners = [Rank(sizes, share, in_flight, chunk, len(shares[0])) for share in shares]
    for rank in (alone, *owners):
        for number in (1, 2):
            rank.step(number)
    assert torch.equal(torch.cat([o.held["master"] for o in owners]), alone.held["master"])
    for owner, share in zip(owners, shares, strict=True):
        for i in (0, 1):
            moment = owner.held["moments"][i * len(share) : (i + 1) * len(share)]
            assert torch.equal(moment, alone.held["moments"][i * numel : (i + 1) * numel][share.start : share.stop])
        for name, own, _ in parts(named(sizes), share):
            assert torch.equal(owner.weights[name][own.start : own.stop], alone.weights[name][own.start : own.stop])
