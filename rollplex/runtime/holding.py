"""A task that the plan's sharing holds back: its process waits for its turn, which is neither its work nor a hang.

decode     128 128 .. 41 40 ..
prefix     held ........| run prefix actor mb 0         the span begins with the work, and says how long it was held

wait                  ended by                             gives up
for a task's turn     decode, which goes on or ends        when the controller ends the run: a rollout rank that died,
                                                           or is in a step for longer than run.step_timeout_s
"""

from __future__ import annotations

import time

from rollplex.ir.steps import Run, Step
from rollplex.runtime.state import ProcessState

LOOK_S = 0.005


def await_turn(state: ProcessState, step: Step) -> int:
    """Returns when the step may begin: the nanoseconds that it was held back, of which the controller is told."""
    if state.engine is None or not isinstance(step, Run) or state.engine.may_begin(step):
        return 0
    began_ns = time.monotonic_ns()
    state.link.hold(True)
    while not state.engine.may_begin(step):
        time.sleep(LOOK_S)
    state.link.hold(False)
    return time.monotonic_ns() - began_ns
