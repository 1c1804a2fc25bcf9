"""What an engine offers the executor: the tasks of the graph, the objects they use, and the life between iterations.

One engine lives in one process. `host` says what every task means; another backend (megatron, vllm) implements the
same protocol, and the executor cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from rollplex.backends.carried import Carried
from rollplex.backends.device import Device
from rollplex.backends.lanes import LaneSpan
from rollplex.backends.publication import Publication
from rollplex.ir.steps import Exchange, Rebuild, Run

Values = dict[str, Any]


@dataclass(frozen=True)
class EngineReport:
    """What an engine measured in one iteration: ledger logs, and metrics by name.

    `events` and `marks` are those of its device, `pool_events` and `pool_marks` of its GPU's pinned pool. `metrics` are
    the same on all ranks, or to be averaged over them; `sums` are a rank's parts of a whole. `lanes` is work that ran
    beside the steps.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    sums: dict[str, float] = field(default_factory=dict)
    events: tuple[Any, ...] = ()
    marks: tuple[Any, ...] = ()
    pool_events: tuple[Any, ...] = ()
    pool_marks: tuple[Any, ...] = ()
    lanes: tuple[LaneSpan, ...] = ()


@dataclass(frozen=True)
class TrainedState:
    """What the runtime's optimizer works on: one role's trained parameters in their flat order, and where they lie.

    Of the flat order this rank updates the elements `share`: of master and moments it has no others. `current(name)` is
    gradients, master or moments as one flat tensor of `dtype`, wherever the plan has it now (it may be longer than
    needed: pages). `weights[name]` are the parameters that engines read: there a cast result goes. `undecayed` are
    parameters that weight decay leaves alone, `counted` those whose gradient this rank counts in the norm; `sums(x)`
    are the x of all ranks that count parts of one model. `label` stands before the names of the role's metrics: nothing
    for the policy, `critic_`. `publication` is told what is written and when it is whole, where others read it. On
    `device` the weights lie, and chunks of streamed state are updated.

    While a block under `finals(tell)` runs the last backward of the step, `tell` hears, in that thread, which elements
    of the gradients are final, each once; what it does not hear of is final when the block ends. `reduce(op, elements)`
    sums them over the replicas, for all of them or each where it is owned (`Exchange.op`).
    """

    role: str
    label: str
    sizes: tuple[tuple[str, int], ...]
    share: range
    dtype: torch.dtype
    weights: Mapping[str, Tensor]
    current: Callable[[str], Tensor]
    undecayed: frozenset[str]
    counted: frozenset[str]
    sums: Callable[[float], list[float]]
    publication: Publication | None
    device: Device
    finals: Callable[[Callable[[range], None]], AbstractContextManager[None]]
    reduce: Callable[[str, range], None]


class Objects(Protocol):
    """The planned objects of one process; `step` is the step's text, for messages and the log."""

    def map(self, name: str, step: str) -> None:
        """Attach fresh pages. PlanError if mapped, OutOfMemory over capacity."""
        ...

    def unmap(self, name: str, step: str) -> None:
        """Detach pages. PlanError if unmapped, or if the only copy would be lost."""
        ...

    def map_part(self, name: str, start: int, stop: int, step: str) -> None:
        """Attach fresh pages to bytes [start, stop). PlanError if some are mapped, OutOfMemory over capacity."""
        ...

    def unmap_part(self, name: str, start: int, stop: int, step: str) -> None:
        """Detach the pages of bytes [start, stop). PlanError as `unmap`."""
        ...

    def handed_out(self, name: str) -> list[int]:
        """New descriptors of an object's pages, for another process; the caller closes them."""
        ...

    def fetch(self, name: str, step: str) -> None:
        """Host copy to fresh pages. PlanError without a valid host copy."""
        ...

    def offload(self, name: str, step: str) -> None:
        """Pages to host copy, then unmap."""
        ...

    def offload_part(self, name: str, start: int, stop: int, step: str) -> None:
        """Bytes [start, stop) to the host copy, and let their pages go; one thread a time, beside other work."""
        ...

    def put(self, name: str, step: str) -> None:
        """A task begins to stream an object to the host. PlanError where another has its place in the pinned pool."""
        ...

    def forget(self, name: str, step: str) -> None:
        """Nothing uses an object at the host any more: its place in the pinned pool is free."""
        ...

    def drop(self, name: str, step: str) -> None:
        """Discard what will be made again. PlanError for what nobody makes again."""
        ...

    def mapped(self, name: str) -> bool:
        """Whether the object has pages now."""
        ...

    def on_host(self, name: str) -> bool:
        """Whether the pinned pool holds the object's slot, so that a task may stream it."""
        ...

    def wrote(self, names: Sequence[str], step: str) -> None:
        """A step has written these objects."""
        ...

    def settle(self) -> None:
        """Return when all that was asked of the device is done: others may read it now."""
        ...

    def window(self, name: str) -> None:
        """A window begins in this process."""
        ...

    def measure(self, names: Sequence[str], step: str) -> AbstractContextManager[None]:
        """While the block runs, measure its working memory inside the workspace among `names`, if there is one."""
        ...


class Tasks(Protocol):
    """The tasks of one process, without memory of its own: all that the controller needs."""

    def begin(self, iteration: int) -> None:
        """An iteration starts: seeds, scratch state of the last one."""
        ...

    def run(self, step: Run, inputs: Mapping[str, Any]) -> Values:
        """Execute one task; returns the step's outputs by name."""
        ...

    def carried(self) -> Carried:
        """What the next iteration needs of those before, for a checkpoint; asked between iterations."""
        ...

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Become what `carried` was; before the first iteration. RunError where it cannot: other inputs."""
        ...


class Engine(Tasks, Protocol):
    """An engine process: one rank of training or rollout."""

    @property
    def objects(self) -> Objects:
        """The rank's objects."""
        ...

    def export(self) -> dict[str, list[int]]:
        """Pages, as descriptors, of the objects that other processes read; once, after the start."""
        ...

    def owners(self, name: str) -> tuple[int, ...]:
        """The training ranks whose pages of an object this process maps: its GPU's where it reads it, else its peers.

        A peer is a rank that it writes slabs to.
        """
        ...

    def adopt(self, name: str, owner: int, fds: Sequence[int], step: str) -> None:
        """Bind the pages that training rank `owner` has of an object: at the start, and again when it has new ones.

        `step` is the step's text, for messages.
        """
        ...

    def let_go(self, name: str, step: str) -> None:
        """Unmap what was adopted of an object."""
        ...

    def ready(self) -> dict[str, Any]:
        """All pages are bound: make what depends on them; facts about the engine for the report."""
        ...

    def may_begin(self, step: Run) -> bool:
        """Whether the plan's sharing of the GPU lets a task begin now; where not, it does when other work goes on."""
        ...

    def exchange(self, step: Exchange) -> None:
        """What the ranks of a group send each other."""
        ...

    def scale(self, step: Run, inputs: Mapping[str, Any]) -> float:
        """What a role's gradient, summed up over prompt groups, is multiplied by before its norm: 1 / divisor."""
        ...

    def rebuild(self, step: Rebuild) -> None:
        """Copy and permute the tensors that cannot alias."""
        ...

    def trained(self) -> Mapping[str, TrainedState]:
        """What the optimizers of this rank work on, by role, the policy first; empty for a rank that trains nothing."""
        ...

    def finish(self) -> EngineReport:
        """The iteration is over; what was measured."""
        ...

    def save(self, path: Path) -> None:
        """Write the actor's weights as a Hugging Face directory at `path`, complete or not at all."""
        ...

    def digests(self) -> dict[str, str]:
        """Digests of all training state, by name (digest.py)."""
        ...

    def close(self) -> None:
        """Let all memory go."""
        ...
