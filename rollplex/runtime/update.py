"""Phase P3 of one role on one rank: norm and clipping, Adam chunk by chunk through the workspace, new weights.

gradients  master  moments        where the plan has them: pages, or their slots in the pinned pool
    \\        |       /
           workspace                     ->  state written back, weights cast into the shared snapshot
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
    allocate_workspace,
    clip_scale,
    flat_layout,
    global_norm,
)


class StreamedUpdate:
    """The optimizer of one role on one rank; `steps` counts updates, `metrics` are those of the last one."""

    def __init__(self, options: Optimizer, trained: TrainedState) -> None:
        self.options = options
        self.trained = trained
        self.slabs = flat_layout(trained.sizes)
        self.numel = self.slabs[-1].stop
        self.steps = 0
        self.metrics: dict[str, float] = {}
        self._scale = 1.0
        self._covered: list[tuple[int, int]] = []

    def state(self) -> FlatState:
        """Master, moments and gradient where they are now."""
        return FlatState(self._flat("master"), *self._moments(), self._flat("gradients"))

    def norm(self, scale: float = 1.0) -> float:
        """The global norm of the gradient, which is `scale` times what lies there; every chunk scales and clips it."""
        counted = [slab for slab in self.slabs if slab.name in self.trained.counted]
        norm = scale * global_norm(self._flat("gradients"), counted, self.trained.sums)
        clip, label = clip_scale(norm, self.options.clip_norm), self.trained.label
        self._scale = scale * clip
        self.metrics = {f"{label}grad_norm": norm, f"{label}clip_scale": clip}
        return norm

    def chunk(self, step: UpdateChunk) -> None:
        """Update elements [start, stop) and write them into the snapshot."""
        if not self._covered:
            self.steps += 1
        self._covered.append((step.start, step.stop))
        state = self.state()
        workspace = self._workspace(step, state)
        self._adam(state).step([(step.start, step.stop)], self.steps, self._scale, workspace)

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
        first, second = self._moments()
        parts = {"master": self._flat("master"), "exp_avg": first, "exp_avg_sq": second}
        return {f"{self.trained.role}.{name}": digest(part) for name, part in parts.items()}

    def _flat(self, name: str) -> Tensor:
        return self.trained.current(name)[: self.numel]

    def _moments(self) -> tuple[Tensor, Tensor]:
        both = self.trained.current("moments")
        return both[: self.numel], both[self.numel : 2 * self.numel]

    def _adam(self, state: FlatState) -> ChunkedAdam:
        options = self.options
        config = AdamConfig(options.lr, options.betas, options.eps, options.weight_decay)
        return ChunkedAdam(config, self.slabs, state, self.trained.weights)

    def _workspace(self, step: UpdateChunk, state: FlatState) -> Workspace:
        """Room of the chunk's own for state that is streamed, the state itself where it is resident."""
        if step.streams:
            return allocate_workspace(step.stop - step.start, self.trained.dtype)
        parts = (state.master, state.exp_avg, state.exp_avg_sq, state.grad)
        return Workspace(*(part[step.start : step.stop] for part in parts))
