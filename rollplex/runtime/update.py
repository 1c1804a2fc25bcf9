"""Phase P3 of one role on one rank: norm and clipping, Adam chunk by chunk through workspaces, new weights.

gradients  master  moments        where the plan has them: pages, or their slots in the pinned pool
    \\        |       /
        workspaces                       ->  state written back, weights cast into the shared snapshot

The program has a step for each chunk. A step updates its chunk while the next ones are loaded and those before are
stored (stream.py): the chunks of the program are known from the start. The last one returns when all are stored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from rollplex.backends.digest import digest
from rollplex.backends.engine import TrainedState
from rollplex.backends.lanes import LaneSpan
from rollplex.ir.errors import EngineError
from rollplex.ir.job_schema import Optimizer
from rollplex.ir.steps import Publish, Step, UpdateChunk
from rollplex.runtime.optimizer import (
    AdamConfig,
    ChunkedAdam,
    FlatState,
    Slab,
    blocks,
    clip_scale,
    flat_layout,
    global_norm,
    overlaps,
    square,
)
from rollplex.runtime.stream import UPDATE, ChunkStream, in_place, ring


class StreamedUpdate:
    """The optimizer of one role on one rank; `steps` counts updates, `metrics` are those of the last one.

    `program` has the chunks of the role; a stage of one that hangs is given up after `patience_s`. `tell` hears which
    stage of which chunk a lane begins, and an empty text when it is done.
    """

    def __init__(
        self,
        options: Optimizer,
        trained: TrainedState,
        program: Iterable[Step],
        patience_s: float = 60.0,
        tell: Callable[[str, str], None] = lambda lane, text: None,
    ) -> None:
        self.options = options
        self.trained = trained
        whole = flat_layout(trained.sizes, decay=lambda name: name not in trained.undecayed)
        self.slabs, self._snapshot = _share(whole, trained)
        self.numel = len(trained.share)
        self._counted = [slab for slab in self.slabs if slab.name in trained.counted]
        self._blocks = list(blocks(self._counted, trained.device.torch))
        self.steps = 0
        self.metrics: dict[str, float] = {}
        self.spans: tuple[LaneSpan, ...] = ()
        own = (step for step in program if isinstance(step, UpdateChunk) and step.role == trained.role)
        self._chunks = [self._clipped(step) for step in own]
        self.patience_s, self.tell = patience_s, tell
        self._squares: dict[range, Tensor] = {}
        self._scale = 1.0
        self._stream: ChunkStream | None = None
        self._covered: list[tuple[int, int]] = []

    def state(self) -> FlatState:
        """Master, moments and gradient where they are now."""
        share = self.trained.share
        gradients = self.trained.current("gradients")[share.start : share.stop]
        return FlatState(self._flat("master"), *self._moments(), gradients)

    def square(self, elements: range) -> None:
        """Sum the squares of these gradients, of which the rank's share counts, before they leave HBM.

        Blocks of the norm that lie in two pieces are left to `norm`, which reads them where they are then.
        """
        first, grad = self.trained.share.start, self.state().grad
        for block in self._blocks[bisect_left(self._blocks, elements.start - first, key=lambda b: b.start) :]:
            if block.stop > elements.stop - first:
                break
            self._squares[block] = square(grad, block)

    def norm(self, scale: float = 1.0) -> float:
        """The global norm of the gradient, which is `scale` times what lies there; every chunk scales and clips it."""
        device = self.trained.device.torch  # where the pieces were summed, wherever they are now
        norm = scale * global_norm(self.state().grad, self._counted, self.trained.sums, self._squares, device)
        self._squares.clear()
        clip, label = clip_scale(norm, self.options.clip_norm), self.trained.label
        self._scale = scale * clip
        self.metrics = {f"{label}grad_norm": norm, f"{label}clip_scale": clip}
        return norm

    def chunk(self, step: UpdateChunk) -> None:
        """Update elements [start, stop) and write them into the snapshot; the workspaces go with the last chunk."""
        if self._stream is None:
            self.steps += 1
            self._stream = self._begin(step)
        if self.trained.publication:
            self.trained.publication.writing(step.index)
        self._stream.update(len(self._covered))  # by its place in the program: `publish` tells a plan that has gaps
        self._covered.append(self._clipped(step))
        if self._stream.done:
            self.spans = self._stream.spans()
            self._stream = None

    def publish(self, step: Publish) -> None:
        """The new weights are whole; EngineError unless the chunks of this step cover the parameters exactly once."""
        at = 0
        for start, stop in sorted(self._covered):
            if start != at:
                break
            at = stop
        if at != self.numel:
            what = f"{step.object} is published, but from element {at} of {self.numel} on it was not updated once"
            raise EngineError(what, where=f"window {step.window}", hint="verify the plan: its chunks have a gap")
        self._covered.clear()
        if self.trained.publication:
            self.trained.publication.publish()

    def close(self) -> None:
        """Another step has failed: nothing goes on behind it."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def digests(self) -> dict[str, str]:
        """Of master weights and moments; of a share, with its elements in the flat order."""
        first, second = self._moments()
        parts, share = {"master": self._flat("master"), "exp_avg": first, "exp_avg_sq": second}, self.trained.share
        cut = "" if self.numel == sum(n for _, n in self.trained.sizes) else f"[{share.start}:{share.stop}]"
        where = self.trained.device.torch
        return {f"{self.trained.role}.{name}{cut}": digest(part, device=where) for name, part in parts.items()}

    def _clipped(self, step: UpdateChunk) -> tuple[int, int]:
        """The last share may be shorter than those that the plan has chunks for."""
        return min(step.start, self.numel), min(step.stop, self.numel)

    def carried(self) -> dict[str, int]:
        """What a checkpoint holds beside the state's tensors; JSON."""
        return {"steps": self.steps}

    def restore(self, facts: Mapping[str, int]) -> None:
        """Go on counting where `carried` was."""
        self.steps = facts["steps"]

    def _flat(self, name: str) -> Tensor:
        return self.trained.current(name)[: self.numel]

    def _moments(self) -> tuple[Tensor, Tensor]:
        both = self.trained.current("moments")
        return both[: self.numel], both[self.numel : 2 * self.numel]

    def _begin(self, step: UpdateChunk) -> ChunkStream:
        """A new update: room of its own for state that is streamed, the state itself where it is resident."""
        options, state = self.options, self.state()
        decoupled = options.kind == "adamw"
        config = AdamConfig(options.lr, options.betas, options.eps, options.weight_decay, decoupled)
        adam = ChunkedAdam(config, self.slabs, state, self._snapshot)
        device = self.trained.device
        streamed = ring(self._chunks, options.in_flight, self.trained.dtype, device.torch) if step.streams else None
        lanes = device.lanes(UPDATE, self.patience_s, self.tell)
        return ChunkStream(
            adam, self._chunks, streamed or in_place(state, self._chunks), lanes, self.steps, self._scale,
            self.trained.role,
        )  # fmt: skip


def _share(whole: Iterable[Slab], trained: TrainedState) -> tuple[tuple[Slab, ...], dict[str, Tensor]]:
    """The parameters that a rank updates, in whole or in part, and the weights that they are cast into."""
    slabs, snapshot, share = [], {}, trained.share
    for slab, low, high in overlaps(whole, share.start, share.stop):
        slabs.append(Slab(slab.name, high - low, low - share.start, slab.decay))
        snapshot[slab.name] = trained.weights[slab.name].detach().view(-1)[low - slab.offset : high - slab.offset]
    return tuple(slabs), snapshot
