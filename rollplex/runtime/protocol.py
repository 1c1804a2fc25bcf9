"""What the controller and an engine process say to each other, as typed messages over a `Channel`.

    engine -> controller   Exported + fds   Ready   Entered, Held, Stage, Left   Signalled   Arrived   Finished   Answer
                           Failed
    controller -> engine   Assign + fds   Adopt + fds   Begin     Deliver     Release     Ask     Stop

A life: Assign, (Exported, Adopt)*, Ready, then for every iteration Begin, (Entered, Held*, Stage*, Left | Signalled |
Deliver | Arrived, Release | Exported | Adopt)*, Finished; Ask and Answer between iterations; Stop. Failed may come
instead of anything.

Messages are pickled: both ends are our own processes of one version, over a socket pair that has no name and that
nobody else can open. A plan comes from outside: it travels as parsed JSON and is validated again where it arrives.
"""

from __future__ import annotations

import io
import pickle
import struct
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rollplex.backends.engine import EngineReport, Values
from rollplex.ir.errors import Problem
from rollplex.runtime.channel import Channel

ALIGN = 64
"""Bytes at multiples of which parts of a message begin: tensors lie in them."""


@dataclass(frozen=True, order=True)
class ProcessId:
    """One process of a run; prints as `train 0`."""

    kind: str
    rank: int

    def __str__(self) -> str:
        return f"{self.kind} {self.rank}"


CONTROLLER = ProcessId("controller", 0)


@dataclass(frozen=True)
class Assign:
    """Who the process is, what it runs, and the directory in which ranks find each other.

    The descriptors are those of the shared ledgers, device then host, then of the devices of its peers.
    """

    process: ProcessId
    plan: dict[str, Any]
    meeting: str


@dataclass(frozen=True)
class Exported:
    """The owner of an object hands out its pages (descriptors follow the message)."""

    object: str


@dataclass(frozen=True)
class Adopt:
    """Pages that training rank `owner` has of an object which this process maps (descriptors follow the message)."""

    object: str
    owner: int


@dataclass(frozen=True)
class Ready:
    """The engine is built, its initial objects are in place, its imports are bound."""

    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Begin:
    """Run the program once, as this iteration."""

    iteration: int


@dataclass(frozen=True)
class Entered:
    """The process is about to execute step `index` of its program."""

    iteration: int
    index: int


@dataclass(frozen=True)
class Held:
    """The step that the process entered waits for its turn, as the plan's sharing has it, or need not any more."""

    waiting: bool


@dataclass(frozen=True)
class Stage:
    """Work beside the steps: a lane begins what `text` says, or is done where it is empty."""

    lane: str
    text: str


@dataclass(frozen=True)
class Left:
    """Step `index` is done; CLOCK_MONOTONIC nanoseconds, the same clock in every process of a host.

    Before it began it waited `held_ns` for its turn.
    """

    iteration: int
    index: int
    start_ns: int
    stop_ns: int
    held_ns: int


@dataclass(frozen=True)
class Signalled:
    """An event of the plan, with the values it carries."""

    event: str
    values: Values


@dataclass(frozen=True)
class Deliver:
    """A signalled event, passed on to a process that waits for it."""

    event: str
    values: Values


@dataclass(frozen=True)
class Arrived:
    """The process stands at a barrier."""

    barrier: str


@dataclass(frozen=True)
class Release:
    """All processes stand at the barrier: go on."""

    barrier: str


@dataclass(frozen=True)
class Finished:
    """The program is at its end; what was measured on the way."""

    iteration: int
    report: EngineReport


@dataclass(frozen=True)
class Ask:
    """A question between iterations, about files in the directory `path` or about the `digests` of all state.

    `save` the actor as a model, `checkpoint` what the process carries on, `restore` it.
    """

    what: Literal["save", "digests", "checkpoint", "restore"]
    path: str = ""


@dataclass(frozen=True)
class Answer:
    """The answer to an Ask."""

    what: str
    result: dict[str, Any]


@dataclass(frozen=True)
class Failed:
    """The process cannot go on: a RollplexError by class name, or `bug` with one line of what was raised."""

    error: str
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Stop:
    """Release everything and exit with status 0."""


Message = (
    Assign | Exported | Adopt | Ready | Begin | Entered | Held | Stage | Left | Signalled | Deliver | Arrived | Release
    | Finished | Ask | Answer | Failed | Stop
)  # fmt: skip


def send(channel: Channel, message: Message, fds: tuple[int, ...] = ()) -> None:
    """Send one message; raises channel.Closed if the other end is gone."""
    channel.send(encode(message), fds)


def encode(message: Message) -> list[bytes | memoryview]:
    """The bytes of a message in parts that are to follow each other; those of tensors are not copied.

    sizes of the parts behind this one | the message, pickled | elements of a tensor | .. each filled up to 64 bytes
    """
    out, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(message)
    parts = [out.getbuffer(), *(buffer.raw() for buffer in buffers)]
    sizes = struct.pack(f"!I{len(parts)}Q", len(parts), *(part.nbytes for part in parts))
    filled = [(part, bytes(-part.nbytes % ALIGN)) for part in (memoryview(sizes), *parts)]
    return [piece for pair in filled for piece in pair]


def decode(body: bytes | bytearray) -> Message:
    """The message of these bytes; its tensors are writable, and lie in them."""
    (count,), at = struct.unpack_from("!I", body), 4
    sizes, at = struct.unpack_from(f"!{count}Q", body, at), at + 8 * count
    parts, view = [], memoryview(body)
    for size in sizes:
        at += -at % ALIGN
        parts.append(view[at : at + size])
        at += size
    return pickle.loads(parts[0], buffers=parts[1:])


class _Pickler(pickle.Pickler):
    """torch pickles a tensor as an archive of its whole storage; a value needs only its elements."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        assert not obj.requires_grad, "a value that travels between processes is detached"
        if not obj.numel():
            return _empty, (tuple(obj.shape), obj.dtype)
        flat = obj.contiguous().view(-1).view(torch.uint8)
        return _tensor, (pickle.PickleBuffer(flat.numpy().data), obj.dtype, tuple(obj.shape))


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _tensor(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape)
