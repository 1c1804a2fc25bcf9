"""ZeRO-1: every data-parallel rank updates a share of the flat parameters and sends its new weights to the others.

flat order    |embed.........|q......|k..|v..|o.......|..      gradients of all prompts are summed where they are owned
shares        [  of rank 0        )[  of rank 1          )     a boundary may fall anywhere, the last may be shorter
weights       each rank's elements are sent from where they lie to where they lie: nothing is copied in between
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from rollplex.backends.collectives import Groups

Sizes = Sequence[tuple[str, int]]
"""Names of parameters and their elements, in the flat order."""
DP = "dp"


def shares_of(numel: int, ranks: int) -> tuple[range, ...]:
    """The elements that each rank updates: as the plan has it, equal but for the last."""
    size = -(-numel // ranks)
    return tuple(range(min(r * size, numel), min((r + 1) * size, numel)) for r in range(ranks))


def parts(sizes: Sizes, share: range) -> Iterator[tuple[str, range, int]]:
    """Of each parameter that a share meets: its name, which of its own elements, and where they lie in the share."""
    at = 0
    for name, numel in sizes:
        low, high = max(share.start, at), min(share.stop, at + numel)
        if low < high:
            yield name, range(low - at, high - at), low - share.start
        at += numel


def joined(sizes: Sizes, weights: Mapping[str, Tensor], share: range) -> Iterator[Tensor]:
    """The weights of a share as flat views; neighbours in memory are one."""
    run: Tensor | None = None
    for name, own, _ in parts(sizes, share):
        piece = weights[name].detach().view(-1)[own.start : own.stop]
        if run is not None and _behind(run, piece):
            run = run.as_strided((run.numel() + piece.numel(),), (1,))
            continue
        if run is not None:
            yield run
        run = piece
    if run is not None:
        yield run


def _behind(run: Tensor, piece: Tensor) -> bool:
    same = run.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
    return same and run.storage_offset() + run.numel() == piece.storage_offset()


@dataclass(frozen=True)
class Shares:
    """How a role's parameters are dealt out to the data-parallel ranks: in shares, or all to each."""

    groups: Groups
    sizes: Sizes
    of_ranks: tuple[range, ...]

    @classmethod
    def of(cls, groups: Groups, sizes: Sizes, cut: bool) -> Shares:
        """Shares for every rank of the group that this rank is in, where updates are `cut`."""
        numel, ranks = sum(n for _, n in sizes), groups.size(DP)
        return cls(groups, sizes, shares_of(numel, ranks) if cut else (range(numel),) * ranks)

    @property
    def numel(self) -> int:
        """Elements that this rank has weights and gradients of."""
        return self.of_ranks[-1].stop

    @property
    def own(self) -> range:
        """The elements that this rank updates."""
        return self.of_ranks[self.groups.place(DP)]

    @property
    def cut(self) -> bool:
        """Whether others update what this rank does not."""
        return len(self.own) < self.numel

    def reduce_scatter(self, flat: Tensor, elements: range) -> None:
        """Sum these gradients over the replicas, each on its owner; what others own is undefined afterwards."""
        for owner, share in enumerate(self.of_ranks):
            start, stop = max(share.start, elements.start), min(share.stop, elements.stop)
            if start < stop:
                self.groups.reduce(DP, flat[start:stop], owner)

    def all_gather(self, weights: Mapping[str, Tensor]) -> None:
        """Every owner's new weights to all replicas, in place."""
        for owner, share in enumerate(self.of_ranks):
            for run in joined(self.sizes, weights, share):
                self.groups.broadcast(DP, run, owner)

    def fill(self, flat: Tensor, fill: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Give the own share its initial values: `fill` takes whole parameters; what a boundary cuts is made aside."""
        whole, into, cut = dict(self.sizes), {}, []
        for name, own, at in parts(self.sizes, self.own):
            place = flat[at : at + len(own)]
            into[name] = place if len(own) == whole[name] else place.new_empty(whole[name])
            if len(own) < whole[name]:
                cut.append((place, into[name][own.start : own.stop]))
        fill(into)
        for place, values in cut:
            place.copy_(values)
