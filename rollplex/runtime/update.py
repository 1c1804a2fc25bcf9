"""Phase P3 of one rank: norm and clipping, Adam chunk by chunk through the workspace, the new weights in the snapshot.

gradients  master  moments        where the plan has them: pages, or their slots in the pinned pool
    \\        |       /
     workspace slot i % in flight        ->  state written back, weights cast into the shared snapshot
"""

from __future__ import annotations

from torch import Tensor

from rollplex.backends.digest import digest
from rollplex.backends.engine import TrainedState
from rollplex.ir.errors import EngineError
from rollplex.ir.job_schema import Optimizer
from rollplex.ir.steps import Publish, UpdateChunk
from rollplex.runtime.optimizer import (
    AdamConfig,
    ChunkedAdam,
    FlatState,
    Workspace,
    clip_scale,
    flat_layout,
    global_norm,
)


class StreamedUpdate:
    """The optimizer of one rank; `steps` counts updates, `metrics` are those of the last one."""

    def __init__(self, options: Optimizer, trained: TrainedState, chunk_elements: int) -> None:
        self.options = options
        self.trained = trained
        self.slabs = flat_layout(trained.sizes)
        self.numel = self.slabs[-1].stop
        self.steps = 0
        self.metrics: dict[str, float] = {}
        self._scale = 1.0
        self._chunk_elements = chunk_elements
        self._covered: list[tuple[int, int]] = []

    def state(self) -> FlatState:
        """Master, moments and gradient where they are now."""
        moments = self.trained.current("moments")
        first, second = moments[: self.numel], moments[self.numel : 2 * self.numel]
        return FlatState(self._flat("master"), first, second, self._flat("gradients"))

    def norm(self) -> float:
        """The gradient's global norm; sets the scale that clips every chunk of this step."""
        norm = global_norm(self._flat("gradients"), self.slabs)
        self._scale = clip_scale(norm, self.options.clip_norm)
        self.metrics = {"grad_norm": norm, "clip_scale": self._scale}
        return norm

    def chunk(self, step: UpdateChunk) -> None:
        """Update elements [start, stop) and write them into the snapshot."""
        if not self._covered:
            self.steps += 1
        self._covered.append((step.start, step.stop))
        workspace = self._workspace(step.index, step.stop - step.start)
        self._adam().step([(step.start, step.stop)], self.steps, self._scale, workspace)

    def publish(self, step: Publish) -> None:
        """EngineError unless the chunks of this step cover the parameters exactly once."""
        at = 0
        for start, stop in sorted(self._covered):
            if start != at:
                break
            at = stop
        if at != self.numel:
            what = f"{step.object} is published, but from element {at} of {self.numel} on it was not updated once"
            raise EngineError(what, where=f"window {step.window}", hint="verify the plan: its chunks have a gap")
        self._covered.clear()

    def digests(self) -> dict[str, str]:
        """sha256 of master weights and moments."""
        state = self.state()
        parts = {"master": state.master, "exp_avg": state.exp_avg, "exp_avg_sq": state.exp_avg_sq}
        return {f"{self.trained.role}.{name}": digest(part) for name, part in parts.items()}

    def _flat(self, name: str) -> Tensor:
        return self.trained.current(name)[: self.numel]

    def _adam(self) -> ChunkedAdam:
        options = self.options
        config = AdamConfig(options.lr, options.betas, options.eps, options.weight_decay)
        return ChunkedAdam(config, self.slabs, self.state(), self.trained.weights)

    def _workspace(self, index: int, elements: int) -> Workspace | None:
        """The workspace slot that this chunk uses; None where the plan updates in place."""
        flat = self.trained.workspace()
        if flat is None:
            return None
        size = 4 * max(self._chunk_elements, elements)
        slots = flat.numel() // size
        assert slots, f"a workspace of {flat.numel()} elements for chunks of {elements}"
        first = index % slots * size
        return Workspace(*flat[first : first + size].chunk(4))
