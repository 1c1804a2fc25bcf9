"""Chunked Adam over one rank's flat state: norm and clipping first, then load, update, store chunk by chunk.

    slabs       |embed........|layers.0.q.....|layers.0.k..|...   one flat order of all parameters of the rank
    chunks      [   0   )[   1   )[   2   )[   3  ) ...           element ranges; a boundary may fall anywhere
    a chunk     load   host master, moments, gradient -> workspace (clipped on the way)
                update torch's own Adam on the workspace, one call for all that decays and one for the rest
                store  workspace -> host state, and the cast master -> the snapshot that rollout reads

The result does not depend on the chunks, to the bit: Adam is elementwise, and the norm is summed in blocks that are
fixed by the slabs. `load`, `update` and `store` touch nothing but their own workspace and the chunk's own range, so
neighbouring chunks may run them at the same time on different workspaces. Paper section 3.3; design.md section 6.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch.optim.adam import adam

from rollplex.ir.errors import RunError

# At most torch's grain size (32768), so that one thread sums a block, whatever the number of threads.
NORM_BLOCK = 16384
# A GPU sums a block in an order that its length alone decides; a few launches each, so fewer and longer ones.
GPU_NORM_BLOCK = 1 << 26

LAUNCH = 1 << 30  # elements of a tensor that one launch takes: fewer than 32 bits count


@dataclass(frozen=True)
class Slab:
    """One parameter in the flat order: elements [offset, offset + numel)."""

    name: str
    numel: int
    offset: int
    decay: bool = True

    @property
    def stop(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class AdamConfig:
    """Hyper-parameters; `decoupled` is AdamW, otherwise the decay joins the gradient as in Adam."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True


@dataclass(frozen=True)
class FlatState:
    """The rank's permanent state and gradient, each one flat tensor over all slabs; mostly views of host slots."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor


@dataclass(frozen=True)
class Workspace:
    """Room for one chunk in flight: master, both moments, gradient; each at least a chunk long, in the state dtype."""

    master: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    grad: torch.Tensor


def state_dtype(param: torch.dtype) -> torch.dtype:
    """Master weights and moments: float64 for float64 parameters, float32 for all others."""
    return torch.float64 if param == torch.float64 else torch.float32


def flat_layout(sizes: Iterable[tuple[str, int]], decay: Callable[[str], bool] = lambda name: True) -> tuple[Slab, ...]:
    """Slabs laid end to end in the given order; `decay(name)` says which ones weight decay applies to."""
    slabs, offset = [], 0
    for name, numel in sizes:
        slabs.append(Slab(name, numel, offset, decay(name)))
        offset += numel
    return tuple(slabs)


def blocks(slabs: Iterable[Slab], device: torch.device) -> Iterator[range]:
    """The elements whose squares are summed together on this device: blocks start at slab starts."""
    most = NORM_BLOCK if device.type == "cpu" else GPU_NORM_BLOCK
    for slab in slabs:
        for start in range(slab.offset, slab.stop, most):
            yield range(start, min(start + most, slab.stop))


def square(grad: torch.Tensor, block: range) -> torch.Tensor:
    """Sum of squares of a block of a flat gradient: a float64 scalar where the gradient is, which nobody waits for."""
    part = grad[block.start : block.stop]
    if part.is_cuda:
        return torch.linalg.vector_norm(part, dtype=torch.float64).square()  # no copy in float64
    return part.double().square().sum()  # adds up in pairs, which torch's norm of a host does not


def sum_squares(
    grad: torch.Tensor,
    slabs: Iterable[Slab],
    known: Mapping[range, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> float:
    """Sum of squares of the slabs of a flat gradient; `known` are blocks that were summed on `device` before it left.

    `fsum` rounds once, so neither chunks nor the order of the slabs change a bit.
    """
    known, each = known or {}, list(blocks(slabs, device or grad.device))
    there = [known[b] for b in each if b in known]
    here = [square(grad, b) for b in each if b not in known]
    return math.fsum(number for found in (there, here) if found for number in torch.stack(found).tolist())


def global_norm(
    grad: torch.Tensor,
    slabs: Iterable[Slab],
    gather: Callable[[float], Iterable[float]] = lambda own: (own,),
    known: Mapping[range, torch.Tensor] | None = None,
    device: torch.device | None = None,
) -> float:
    """The gradient's norm; `gather` gives the sums of squares of all ranks' parts (each parameter counted once)."""
    return math.sqrt(math.fsum(gather(sum_squares(grad, slabs, known, device))))


def clip_scale(norm: float, max_norm: float | None) -> float:
    """What torch.nn.utils.clip_grad_norm_ multiplies by: min(1, max_norm / (norm + 1e-6)); 1 if `max_norm` is None.

    RunError if the norm is not finite: one such step would publish weights that nothing can repair.
    """
    if not math.isfinite(norm):
        raise RunError(
            f"the gradient's norm is {norm}: the update is refused and the last snapshot stays",
            where="optimizer",
            hint="lower optimizer.lr, or look for log-probabilities of -inf in the loss",
        )
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))


def allocate_workspace(numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Workspace:
    """A workspace of its own for chunks of at most `numel` elements: 4 * numel * itemsize bytes."""
    return Workspace(*(torch.empty(numel, dtype=dtype, device=device) for _ in range(4)))


class ChunkedAdam:
    """Adam for one rank, over flat element ranges.

    `snapshot[name]` receives the cast of the slab `name`: contiguous, `numel` elements, any float dtype; usually a view
    of the arena that rollout maps. A missing name is a slab whose parameter is the master itself.
    """

    def __init__(
        self, config: AdamConfig, slabs: Sequence[Slab], state: FlatState, snapshot: Mapping[str, torch.Tensor]
    ) -> None:
        self.config = config
        self.slabs = tuple(slabs)
        self.state = state
        self.snapshot = {name: tensor.detach().view(-1) for name, tensor in snapshot.items()}
        _check_shapes(self.slabs, state, self.snapshot)

    def step(
        self,
        chunks: Iterable[tuple[int, int]],
        step: int,
        scale: float = 1.0,
        workspace: Workspace | None = None,
        done: Callable[[int, int], None] | None = None,
    ) -> None:
        """One update, chunk after chunk: `step` counts from 1 and is the caller's to keep, `scale` is `clip_scale`'s.

        `done(start, stop)` is called after each stored chunk. Without a workspace the state is updated in place.
        """
        for start, stop in chunks:
            work = self.load(start, stop, scale, workspace)
            self.update(work, start, stop, step)
            self.store(work, start, stop)
            if done is not None:
                done(start, stop)

    def load(self, start: int, stop: int, scale: float, workspace: Workspace | None = None) -> Workspace:
        """Bring the chunk's state and clipped gradient into the workspace; returns views of the chunk's length."""
        state, numel = self.state, stop - start
        if workspace is None:
            grad = (state.grad[start:stop].to(state.master.dtype)).mul(scale)
            return Workspace(state.master[start:stop], state.exp_avg[start:stop], state.exp_avg_sq[start:stop], grad)
        work = Workspace(*(part[:numel] for part in _parts(workspace)))
        if not _is_view(work, state, start, stop):
            for into, part in zip(_parts(work), _parts(state), strict=True):
                into.copy_(part[start:stop], non_blocking=True)
        work.grad.mul_(scale)
        return work

    def update(self, work: Workspace, start: int, stop: int, step: int) -> None:
        """Adam on the workspace, in place; touches neither host state nor snapshot. The workspace's gradient is spent.

        A GPU runs torch's fused kernel, which reads and writes each state once; a host its plain one. torch's Adam
        would make a copy of the gradient for a decay that joins it: it is added here, in place.
        """
        config, fused = self.config, work.master.is_cuda
        for decay, parts in self._parts_by_decay(work, start, stop).items():
            masters, firsts, seconds, grads = ([piece for p in part for piece in p.split(LAUNCH)] for part in parts)
            amount = config.weight_decay if decay else 0.0
            if amount and not config.decoupled:
                for grad, master in zip(grads, masters, strict=True):
                    grad.add_(master, alpha=amount)
            adam(
                masters, grads, firsts, seconds, [], _counters(len(masters), step - 1, work.master.device),
                foreach=False, fused=fused, amsgrad=False, beta1=config.betas[0], beta2=config.betas[1], lr=config.lr,
                weight_decay=amount if config.decoupled else 0.0, eps=config.eps, maximize=False,
                decoupled_weight_decay=config.decoupled,
            )  # fmt: skip

    def store(self, work: Workspace, start: int, stop: int) -> None:
        """Write the state back and the cast master into the snapshot; the gradient is spent."""
        if not _is_view(work, self.state, start, stop):
            for kept, part in zip(_parts(self.state)[:3], _parts(work)[:3], strict=True):
                kept[start:stop].copy_(part, non_blocking=True)
        self.publish(work.master, start, stop)

    def publish(self, master: torch.Tensor, start: int, stop: int) -> None:
        """Cast master weights of elements [start, stop) into the snapshot; the whole range is a first snapshot."""
        for slab, low, high in overlaps(self.slabs, start, stop):
            if slab.name in self.snapshot:
                into = self.snapshot[slab.name][low - slab.offset : high - slab.offset]
                into.copy_(master[low - start : high - start], non_blocking=True)

    def _parts_by_decay(self, work: Workspace, start: int, stop: int) -> dict[bool, list[list[torch.Tensor]]]:
        """Master, moments and gradient of maximal runs of elements with the same weight decay; each decay at once."""
        found: dict[bool, list[list[torch.Tensor]]] = {}
        for decay, run in groupby(overlaps(self.slabs, start, stop), key=lambda part: part[0].decay):
            parts = list(run)
            low, high = parts[0][1] - start, parts[-1][2] - start
            for kept, part in zip(found.setdefault(decay, [[] for _ in _parts(work)]), _parts(work), strict=True):
                kept.append(part[low:high])
        return found


def overlaps(slabs: Iterable[Slab], start: int, stop: int) -> Iterator[tuple[Slab, int, int]]:
    """The slabs that [start, stop) meets, each with the part of the range inside it."""
    for slab in slabs:
        low, high = max(start, slab.offset), min(stop, slab.stop)
        if low < high:
            yield slab, low, high


def _counters(count: int, steps: int, device: torch.device) -> list[torch.Tensor]:
    """So many numbers of steps done, as Adam takes them.

    A GPU fills them itself: a copy from the host would wait for everything that its lane has to do.
    """
    if device.type == "cpu":
        return [torch.tensor(float(steps)) for _ in range(count)]
    return list(torch.full((count,), float(steps), device=device).unbind())


def _parts(state: FlatState | Workspace) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return state.master, state.exp_avg, state.exp_avg_sq, state.grad


def _is_view(work: Workspace, state: FlatState, start: int, stop: int) -> bool:
    """Whether the workspace is the state itself, updated in place."""
    return work.master.data_ptr() == state.master[start:stop].data_ptr()


def _check_shapes(slabs: Sequence[Slab], state: FlatState, snapshot: Mapping[str, torch.Tensor]) -> None:
    numel = slabs[-1].stop if slabs else 0
    for part in _parts(state):
        assert part.shape == (numel,), f"flat state of shape {tuple(part.shape)} for {numel} elements"
    for slab in slabs:
        got = snapshot[slab.name].numel() if slab.name in snapshot else slab.numel
        assert got == slab.numel, f"{slab.name}: snapshot of {got} elements, slab of {slab.numel}"
