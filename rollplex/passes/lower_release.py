"""The steps around an update that makes a released snapshot again, in both programs that map its pages.

rollout   barrier theta-quiet | unmap (imported) | signal             wait | map (imported) | signal
train     barrier theta-quiet | wait | unmap | map_part | chunk | .. | export | signal | wait | publish
with q > 1:
train     unmap (imported) | barrier theta-quiet | .. | export | signal | map (imported) | write | wait | publish

What a trainer imports are the pages of its peers, whose slabs make up a rollout shard with its own: all ranks have let
them go when they meet at the barrier, and map new ones as their owners hand them out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rollplex.ir.steps import Export, Map, MapPart, Signal, Step, Unmap, UnmapPart, Wait
from rollplex.passes.chunk_sizes import Chunks
from rollplex.passes.layout import Layout
from rollplex.passes.lowering import Context
from rollplex.passes.releasing import Cuts, Rewritten, rewritten
from rollplex.passes.rewriting import names, rewritten_objects
from rollplex.passes.state import Lifetimes

LET_GO, NEW_PAGES, TAKEN = "snapshot-let-go", "snapshot-has-pages", "snapshot-taken"
"""Of a snapshot that an update makes again: its readers have unmapped it, may map its new pages, have mapped them."""


@dataclass(frozen=True)
class ReleasedSnapshot(Context):
    """Makes steps where `remade` names a snapshot, and none where it stays."""

    @property
    def has_readers(self) -> bool:
        """Whether the rollout engine maps the pages of a released snapshot too."""
        return bool(self.remade and self.module[Lifetimes][self.remade].readers)

    @property
    def from_peers(self) -> int:
        """Bytes of the policy's snapshot that other training ranks write into a GPU's pages."""
        return 0 if self.refreshed else self.module[Layout].summary.exchange_bytes_per_gpu

    @property
    def rewritten(self) -> tuple[Rewritten, ...]:
        """The policy's chunks with the pages that come and go around them; empty where the snapshot stays."""
        sizes, (snapshot, gradients) = rewritten_objects(self.module), names(self.module)
        if not sizes:
            return ()
        elements = self.module[Chunks].summary.optimizer.elements
        return rewritten(Cuts.of(self.module.job, sizes[snapshot], sizes.get(gradients, 0)), elements)

    def let_go(self, window: str) -> Iterator[Step]:
        """Nobody reads theta_k any more: its pages are room for the update, once its readers have unmapped them."""
        if self.has_readers:
            yield Wait(window=window, event=LET_GO)
        if self.remade:
            yield Unmap(window=window, object=self.remade)

    def comes(self, window: str, parts: tuple[Rewritten, ...], index: int) -> Iterator[Step]:
        """Pages that a chunk writes, and none before it has."""
        for start, stop in (part.comes for part in parts[index : index + 1]):
            if start < stop:
                yield MapPart(window=window, object=f"{self.policy}.snapshot", start=start, stop=stop)

    def goes(self, window: str, parts: tuple[Rewritten, ...], index: int) -> Iterator[Step]:
        """Gradients that a chunk was the last to read."""
        for start, stop in (part.goes for part in parts[index : index + 1]):
            if start < stop:
                yield UnmapPart(window=window, object=f"{self.policy}.gradients", start=start, stop=stop)

    def peers_let_go(self, window: str) -> Iterator[Step]:
        """Peers' pages, which they release behind the next barrier."""
        if self.remade and self.from_peers:
            yield Unmap(window=window, object=self.remade, imported=True)

    def handed_out(self, window: str) -> Iterator[Step]:
        """The new pages of a snapshot that was released, to its readers, and to the peers that write into them."""
        if self.remade and (self.has_readers or self.from_peers):
            yield Export(window=window, object=self.remade)
        if self.has_readers:
            yield Signal(window=window, event=NEW_PAGES)
        if self.remade and self.from_peers:
            yield Map(window=window, object=self.remade, imported=True)

    def taken(self, window: str) -> Iterator[Step]:
        """A snapshot that was released is not published before its readers have its new pages."""
        if self.has_readers:
            yield Wait(window=window, event=TAKEN)

    def bound_again(self) -> Iterator[Step]:
        """Let go of a snapshot that is released, and take its new pages, at the same addresses."""
        if self.remade and self.has_readers:
            quiet, publish = self.last_window["P2"], self.updating
            yield Unmap(window=quiet, object=self.remade, imported=True)
            yield Signal(window=quiet, event=LET_GO)
            yield Wait(window=publish, event=NEW_PAGES)
            yield Map(window=publish, object=self.remade, imported=True)
            yield Signal(window=publish, event=TAKEN)
