"""Gradients on their way out, piece by piece, beside the backward that makes them final.

    backward   | layer 3 | layer 2 | layer 1 | layer 0 |               the caller, who tells what is final
    reduce               | 0 |     | 1 |     | 2 |     | 3 |           over data-parallel ranks, on all in one order
    square                   | 0 |     | 1 |     | 2 |     | 3 |       for the norm, while the piece is in HBM
    offload                      | 0 |     | 1 |     | 2 |     | 3 |   to its place in the pinned pool; its pages go

Pieces go in the order of the plan: one that is final early waits for those before it, so that every rank enters the
same collectives. At the end of the task everything is final. Paper section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollplex.backends.engine import Objects
from rollplex.backends.lanes import Event, Lanes, ThreadLanes
from rollplex.ir.steps import Piece, Run, describe
from rollplex.runtime.state import ProcessState
from rollplex.runtime.update import StreamedUpdate

BACKWARD = "backward"
"""The lane of the caller, which has its own work to do."""


@contextmanager
def leaving(state: ProcessState, step: Run) -> Iterator[None]:
    """The block runs the step: its pieces leave meanwhile, and have left when this ends."""
    if not step.offloads:
        yield
        return
    update = state.optimizer(step.role)
    lanes = ThreadLanes(BACKWARD, update.patience_s, update.tell, where=f"gradients of {step.role}")
    try:
        pieces = Pieces(step, state.memory.objects, update, lanes)
        with update.trained.finals(pieces.final):
            yield
        pieces.finish()
    finally:
        lanes.close()
        state.lanes += lanes.spans()


@dataclass
class Pieces:
    """The pieces of one step; `_left` counts the elements of each that are not final, `_going` those that go."""

    step: Run
    objects: Objects
    update: StreamedUpdate
    lanes: Lanes
    _left: list[int] = field(default_factory=list)
    _going: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._left = [len(self._elements(piece)) for piece in self.step.offloads]

    def final(self, elements: range) -> None:
        """Nothing adds to these elements any more; each is told once."""
        for i, piece in enumerate(self.step.offloads):
            self._left[i] -= len(_common(self._elements(piece), elements))
        while len(self._going) < len(self._left) and not self._left[len(self._going)]:
            self._send()

    def finish(self) -> None:
        """Everything is final: send what is left, and wait for all of it."""
        while len(self._going) < len(self._left):
            self._send()
        self.lanes.wait(self._going)

    def _send(self) -> None:
        """The next piece: reduced, squared, copied, one after the other, each beside those of its neighbours."""
        index = len(self._going)
        piece, trained = self.step.offloads[index], self.update.trained
        elements, name, text = self._elements(piece), f"piece {index} of {piece.object}", describe(self.step)

        def offload() -> None:
            self.objects.offload_part(piece.object, piece.start, piece.stop, text)

        reduced = (
            [self.lanes.run("reduce", f"reduce of {name}", lambda: trained.reduce(piece.reduce, elements))]
            if piece.reduce
            else []
        )
        squared = self.lanes.run("square", f"squares of {name}", lambda: self.update.square(elements), after=reduced)
        self._going.append(self.lanes.run("offload", f"offload of {name}", offload, after=[squared]))

    def _elements(self, piece: Piece) -> range:
        """The gradients that lie in a piece; behind the last of them there may be the rest of a page."""
        size = self.update.trained.dtype.itemsize
        numel = sum(n for _, n in self.update.trained.sizes)
        return _common(range(-(-piece.start // size), -(-piece.stop // size)), range(numel))


def _common(a: range, b: range) -> range:
    start = max(a.start, b.start)
    return range(start, max(start, min(a.stop, b.stop)))
