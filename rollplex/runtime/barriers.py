"""The three barriers and the events of one iteration, as state machines that the controller steps by messages.

    state   theta_k                       consumes                    leaves when           unblocked by
    P1      read by every engine          Arrived(rollout-complete)   all have arrived      the last one to arrive
    P2      read by the trainer           Arrived(theta-quiet)        all have arrived      the last one to arrive
    P3      may be mixed with theta_k+1   Arrived(published)          all have arrived      the last one to arrive
    done    theta_k+1                     nothing                     the next iteration    the controller (`begin`)

Whoever arrives stays blocked until the last one has arrived, so no process is ever in two states at once. A process at
a barrier that is not the next one, or at one where it already stands, is an EngineError: the plan was not obeyed.
An event is signalled once an iteration, by every rank whose program says so; who waits for it gets its values once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollplex.backends.engine import Values
from rollplex.ir.errors import EngineError
from rollplex.ir.steps import Barrier, Signal, Step, Wait
from rollplex.runtime.protocol import ProcessId


class Barriers:
    """Where the iteration stands: the next barrier, and who already waits at it."""

    def __init__(self, processes: Iterable[ProcessId], order: Sequence[str]) -> None:
        self.processes = frozenset(processes)
        self.order = tuple(order)
        self._next = 0
        self._arrived: set[ProcessId] = set()

    @property
    def expected(self) -> str:
        """The next barrier, or "" after the last one."""
        return self.order[self._next] if self._next < len(self.order) else ""

    @property
    def missing(self) -> tuple[ProcessId, ...]:
        """Who has yet to arrive at the next barrier."""
        return tuple(sorted(self.processes - self._arrived))

    @property
    def arrived(self) -> frozenset[ProcessId]:
        """Who waits at the next barrier."""
        return frozenset(self._arrived)

    def begin(self) -> None:
        """A new iteration; only after the last barrier of the one before."""
        assert self._next in (0, len(self.order)), f"an iteration begins before {self.expected}"
        self._next = 0

    def arrive(self, process: ProcessId, name: str) -> bool:
        """One process stands at a barrier; True if it was the last, and all may go on."""
        if name != self.expected:
            due = self.expected or "the end of the iteration"
            raise EngineError(f"arrived at barrier {name}, but {due} comes next", where=process, hint=_HINT)
        if process in self._arrived or process not in self.processes:
            raise EngineError(f"arrived twice at barrier {name}", where=process, hint=_HINT)
        self._arrived.add(process)
        if self.missing:
            return False
        self._arrived.clear()
        self._next += 1
        return True


class Events:
    """Which events have been signalled in this iteration, by whom, and who is to receive each.

    An event is signalled when all ranks whose program signals it have done so: each has a part of its values.
    """

    def __init__(self, programs: Mapping[ProcessId, Sequence[Step]]) -> None:
        self._signallers = _by_event(programs, Signal)
        self._receivers = _by_event(programs, Wait)
        self._parts: dict[str, dict[ProcessId, Values]] = {}
        self.signalled: set[str] = set()

    def begin(self) -> None:
        """A new iteration: every event may be signalled again."""
        self.signalled.clear()
        self._parts.clear()

    def signal(self, process: ProcessId, event: str, values: Values) -> dict[ProcessId, Values]:
        """One process signals an event; the parts of all its signallers if this was the last, else nothing."""
        parts = self._parts.setdefault(event, {})
        if process in parts:
            raise EngineError(f"signals {event} a second time in one iteration", where=process, hint=_HINT)
        parts[process] = values
        if parts.keys() < self._signallers.get(event, frozenset()):
            return {}
        self.signalled.add(event)
        return {p: parts[p] for p in sorted(parts)}

    def receivers(self, event: str) -> tuple[ProcessId, ...]:
        """Who must receive the values of an event."""
        return tuple(sorted(self._receivers.get(event, frozenset())))


_HINT = "verify the plan with `rollplex verify`, then report this: processes disagree about where they are"


def barrier_order(program: Sequence[Step]) -> tuple[str, ...]:
    """The barriers of a program, in order."""
    return tuple(step.name for step in program if isinstance(step, Barrier))


def _by_event(
    programs: Mapping[ProcessId, Sequence[Step]], kind: type[Signal] | type[Wait]
) -> dict[str, frozenset[ProcessId]]:
    """For every event, the processes whose program signals it, or waits for it."""
    found: dict[str, set[ProcessId]] = {}
    for process, program in programs.items():
        for step in program:
            if isinstance(step, kind):
                found.setdefault(step.event, set()).add(process)
    return {event: frozenset(who) for event, who in found.items()}
