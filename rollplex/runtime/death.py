"""Saying what died: process, pid, how, in which step, window and iteration, and where its log is.

Where one has waited for another in vain, all who are there write where their threads are to their logs, before they are
stopped: of a process that NCCL aborts, that is done by Python as it ends.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress

from rollplex.ir import errors
from rollplex.ir.errors import EngineError, PeerError, Problem, RollplexError
from rollplex.ir.steps import describe
from rollplex.runtime.crew import Member
from rollplex.runtime.protocol import Failed, ProcessId
from rollplex.runtime.spans import Timeline

STACKS_S = 0.2  # from the signal to the stacks in the log
LINGER_S = 2.0  # from the end of a process' channel to its exit
PEER_S = 0.05  # between two looks at who has ended
_WHY = {
    signal.SIGKILL: "something killed it; if nobody did, the kernel was out of memory (see `dmesg`)",
    signal.SIGSEGV: "it touched memory that is not mapped: a use after unmap, or a fault of a library",
    signal.SIGBUS: "the machine had no page to give it: free memory, or lower the job's budgets",
    signal.SIGABRT: "a library gave up (NCCL does where another rank is late); its message is in the log",
}


def place(process: ProcessId, timeline: Timeline) -> str:
    """`in step .., window P1 decode, iteration 3`, with stages of chunks at work, or of its start."""
    stages = ", ".join(timeline.lanes.get(process, {}).values())
    at_work = f" ({stages})" if stages else ""
    if process in timeline.current:
        iteration, step = timeline.current[process]
        return f"in step `{describe(step)}`{at_work}, window {step.window}, iteration {iteration}"
    if process in timeline.finished:
        return f"after iteration {timeline.finished[process]}"
    return f"while it was starting{at_work}"


def status(member: Member, within_s: float) -> int | None:
    """The exit status, negative for a signal; None if the process is still there after `within_s`."""
    return member.child.wait(within_s)


def write_stacks(members: Iterable[Member]) -> None:
    """Have processes write where their threads are to their logs; one that is stopped cannot."""
    there = [member for member in members if member.child.poll() is None]
    for member in there:
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGUSR1)
    time.sleep(STACKS_S if there else 0.0)


def died(member: Member, members: Iterable[Member], timeline: Timeline) -> EngineError:
    """The error for a process that ended by itself, or at least closed its channel."""
    code, why = status(member, LINGER_S), ""
    if code == -signal.SIGABRT:
        write_stacks(members)
    if code is None:
        how = "stopped talking and did not exit"
    elif code < 0:
        number = signal.Signals(-code)
        how, why = f"was killed by {number.name}", _WHY.get(number, "")
    else:
        how = f"exited with status {code}"
    what = f"{member.process} (pid {member.pid}) {how} {place(member.process, timeline)}"
    hint = f"{why}; its log is {member.log}" if why else f"look at its log {member.log}"
    return EngineError(what, where="engine process", hint=hint)


def silent(member: Member, members: Iterable[Member], timeline: Timeline) -> EngineError:
    """The error for a process that is there but says nothing."""
    write_stacks(members)
    what = (
        f"{member.process} (pid {member.pid}) has said nothing for {member.silence.limit_s:g} s "
        f"{place(member.process, timeline)}: it is stopped or hung, and was killed"
    )
    return EngineError(what, where="engine process", hint=f"look at its log {member.log}, or raise run.silent_s")


def stuck(process: ProcessId, limit_s: float, members: Mapping[ProcessId, Member], timeline: Timeline) -> EngineError:
    """The error for a process that lives but does not get on; the stacks of all engines are in their logs then."""
    where, member = place(process, timeline), members.get(process)
    write_stacks(members.values())
    if member is None:
        hint = "look at what the step calls (data, the reward), or raise run.step_timeout_s"
        return EngineError(f"{process} has been at it for {limit_s:g} s {where}", where="controller", hint=hint)
    what = f"{process} (pid {member.pid}) has been at it for {limit_s:g} s {where}: it hangs, and was killed"
    hint = f"its stacks are in {member.log}; raise run.step_timeout_s if the step takes that long"
    return EngineError(what, where="engine process", hint=hint)


def reason(member: Member, members: Collection[Member], timeline: Timeline, message: Failed) -> RollplexError:
    """The error for a process that reported one: the death of another, where that is what it met in a collective."""
    if message.error == PeerError.__name__:
        write_stacks(members)
        deadline = time.monotonic() + LINGER_S
        while time.monotonic() < deadline:
            for other in members:
                if other is not member and (other.child.poll() or 0) < 0:
                    return died(other, members, timeline)
            time.sleep(PEER_S)
        peers = [o.process for o in members if o is not member and o.process.kind == member.process.kind]
        where, hint = "; ".join(f"{peer} {place(peer, timeline)}" for peer in peers), "their stacks are in their logs"
        return PeerError(*failed(member, timeline, message).problems, Problem(where, "its peers meanwhile", hint))
    return failed(member, timeline, message)


def failed(member: Member, timeline: Timeline, message: Failed) -> RollplexError:
    """The error that a process reported: of its own class, with the place added; EngineError for a bug of ours."""
    where = f"{member.process} (pid {member.pid}) {place(member.process, timeline)}"
    if message.error == "bug":
        what = f"{message.problems[0].what}"
        return EngineError(what, where=where, hint=f"this is a bug of Rollplex: report it with {member.log}")
    kind = getattr(errors, message.error, EngineError)
    return kind(*(_placed(problem, where) for problem in message.problems))


def _placed(problem: Problem, where: str) -> Problem:
    inner = f"{problem.where}: {problem.what}" if problem.where else problem.what
    return Problem(inner, where, problem.hint)
