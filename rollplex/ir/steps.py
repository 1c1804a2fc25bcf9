"""The steps of a program: a closed union, data only; one `match` in the checker and one in the executor handle it.

map actor.boundary          attach pages, contents undefined        unmap     detach them, contents gone
map_part, unmap_part        the same for some of an object's bytes  export    hand its new pages to who imports them
fetch reference.weights     host -> HBM                             offload   HBM -> host, then detach
drop actor.prefix_saved     discard what will be recomputed         run       one task of the graph
signal / wait               an event, with the values it carries    barrier   all processes meet
update_chunk / exchange / rebuild / publish                         phase P3
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field


class Strict(BaseModel):
    """Base of everything in a plan: immutable, unknown keys refused, numbers finite."""

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True, allow_inf_nan=False)


Name = Annotated[str, Field(min_length=1)]
# pydantic would read true and 1.0 as 1, "yes" as true
Whole = Annotated[int, Field(strict=True, ge=0, lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]
Number = Annotated[float, Field(strict=True)]
Seconds = Annotated[float, Field(strict=True, ge=0)]


class _Step(Strict):
    window: str = Field(description="name of the window the step belongs to")


class Map(_Step):
    """Attach fresh pages to an object; `imported` binds the pages that the owning process mapped.

    In the owner's own program those are its peers': the other ranks of group `q`, which it writes slabs into.
    """

    kind: Literal["map"] = "map"
    object: Name
    imported: Flag = False


class Unmap(_Step):
    """Detach an object's pages at its last use: its contents are gone unless the host holds a valid copy.

    What is `imported` is let go and stays with its owner; in the owner's own program, that of its peers.
    """

    kind: Literal["unmap"] = "unmap"
    object: Name
    imported: Flag = False


class MapPart(_Step):
    """Attach fresh pages to bytes [start, stop) of an object, whole pages; its others are there or follow."""

    kind: Literal["map_part"] = "map_part"
    object: Name
    start: Whole
    stop: Whole


class UnmapPart(_Step):
    """Detach the pages of bytes [start, stop) of an object, whole pages, whose contents are used up; the rest stays."""

    kind: Literal["unmap_part"] = "unmap_part"
    object: Name
    start: Whole
    stop: Whole


class Export(_Step):
    """Hand out an object's pages, all of which are new, to the processes that import them."""

    kind: Literal["export"] = "export"
    object: Name


class Fetch(_Step):
    """Copy an object from the pinned pool into freshly mapped HBM."""

    kind: Literal["fetch"] = "fetch"
    object: Name


class Offload(_Step):
    """Copy an object from HBM into the pinned pool and detach its pages."""

    kind: Literal["offload"] = "offload"
    object: Name


class Drop(_Step):
    """Discard a regenerable object or a recomputable saved state: it will be made again before its next use."""

    kind: Literal["drop"] = "drop"
    object: Name


Task = Literal["load", "host", "generate", "prefix", "suffix", "whole", "train", "prefix_backward", "grad_norm"]
"""`whole` is a scoring call that is not split; `train` is one too, where its role has no prefix."""


class Piece(Strict):
    """Bytes [start, stop) of an object, whole pages, that leave for the pinned pool while the task that ends them runs.

    Where gradients of replicas are summed, that of the piece comes first.
    """

    object: Name
    start: Whole
    stop: Whole
    reduce: Literal["", "all_reduce", "reduce_scatter"] = ""


class Run(_Step):
    """Execute one task of the graph for one microbatch.

    `reads` / `writes` are objects in HBM; `streams` are objects that live in the pinned pool and that the task moves
    piecewise over the host link (offloaded saved tensors); `inputs` / `outputs` are small host values. `offloads` are
    the pieces of what it writes for the last time, in the order in which they become final: each leaves as it does.
    """

    kind: Literal["run"] = "run"
    task: Task
    node: Name = Field(description="graph node the task executes")
    role: str = ""
    microbatch: Whole = 0
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()
    offloads: tuple[Piece, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


class Signal(_Step):
    """Announce an event; processes that wait for it receive the values it carries."""

    kind: Literal["signal"] = "signal"
    event: Name
    carries: tuple[str, ...] = ()


class Wait(_Step):
    """Block until the event has been signalled in this iteration."""

    kind: Literal["wait"] = "wait"
    event: Name


class Barrier(_Step):
    """All processes meet; the three barriers of paper section 3.1 are rollout-complete, theta-quiet and published."""

    kind: Literal["barrier"] = "barrier"
    name: Name


class Exchange(_Step):
    """What the ranks of a group send each other: gradients are summed over `dp`, slabs of a rollout shard go over `q`.

    Where each replica updates a share, gradients are scattered (`reduce_scatter`) and new weights gathered over `dp`.
    Group `q` is all ranks that own a part of a rollout shard: of each weight class `summary.layout.classes[].group`.
    Each of them writes its slabs into the others' pages, which it has imported (`write`): it begins when all have come
    and is over when all have written. The first pipeline stage sends a trained tower to the others (`broadcast` over
    `pp`).
    """

    kind: Literal["exchange"] = "exchange"
    group: str
    op: Literal["all_reduce", "reduce_scatter", "all_gather", "broadcast", "write"]
    object: Name
    nbytes: Whole = Field(description="bytes a GPU receives")


class UpdateChunk(_Step):
    """Adam on elements [start, stop) of the rank's flat parameter order; state is streamed where it is not resident."""

    kind: Literal["update_chunk"] = "update_chunk"
    role: str
    index: Whole
    start: Whole
    stop: Whole
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    streams: tuple[str, ...] = ()


class Rebuild(_Step):
    """Copy and permute the case-3 tensors of a snapshot into the buffer that the rollout engine reads."""

    kind: Literal["rebuild"] = "rebuild"
    object: Name
    reads: tuple[str, ...] = ()


class Publish(_Step):
    """Declare the rewritten snapshot to be theta_k+1: from here on it may be read again."""

    kind: Literal["publish"] = "publish"
    object: Name


Step = Annotated[
    Map | Unmap | MapPart | UnmapPart | Export | Fetch | Offload | Drop | Run | Signal | Wait | Barrier | Exchange
    | UpdateChunk | Rebuild | Publish,
    Field(discriminator="kind"),
]  # fmt: skip


def role_of(name: str) -> str:
    """The role that an object is named after: `critic` of `critic.snapshot`."""
    return name.partition(".")[0]


def touched(step: Step) -> tuple[str, ...]:
    """Objects whose bytes this step reads or writes in HBM."""
    match step:
        case Run() | UpdateChunk():
            return (*step.reads, *step.writes)
        case Rebuild():
            return (*step.reads, step.object)
        case Exchange() | Publish() | Export():
            return (step.object,)
        case _:
            return ()


def named(step: Step) -> tuple[str, ...]:
    """Every object that a step uses or moves, wherever it is, each once."""
    match step:
        case Run():
            found = (*touched(step), *step.streams, *(piece.object for piece in step.offloads))
        case UpdateChunk():
            found = (*touched(step), *step.streams)
        case Map() | Unmap() | MapPart() | UnmapPart() | Fetch() | Offload() | Drop():
            found = (step.object,)
        case _:
            found = touched(step)
    return tuple(dict.fromkeys(found))


def written_by_peers(program: Iterable[Step]) -> frozenset[str]:
    """Objects that the ranks of a program write into each other's pages of."""
    return frozenset(step.object for step in program if isinstance(step, Exchange) and step.op == "write")


def describe(step: Step) -> str:
    """One line for messages and logs: `run train actor mb 3`."""
    match step:
        case Run():
            return f"run {step.task} {step.role or step.node} mb {step.microbatch}".rstrip()
        case UpdateChunk():
            return f"update_chunk {step.role} {step.index}"
        case Signal() | Wait():
            return f"{step.kind} {step.event}"
        case Barrier():
            return f"barrier {step.name}"
        case Map(imported=True) | Unmap(imported=True):
            return f"{step.kind} {step.object} (imported)"
        case MapPart() | UnmapPart():
            return f"{step.kind} {step.object} [{step.start}, {step.stop})"
        case Exchange():
            return f"exchange {step.op} {step.object} over {step.group}"
        case _:
            return f"{step.kind} {step.object}"
