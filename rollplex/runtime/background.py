"""Work of the controller that takes long (decoding videos, the user's reward) while it keeps an eye on the engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollplex.backends.engine import Tasks, Values
from rollplex.ir.steps import Run

T = TypeVar("T")
Pump = Callable[[Callable[[], bool]], None]


def in_background(work: Callable[[], T], pump: Pump) -> T:
    """Run `work` in a thread of its own and `pump` until it is done; raises what either raises.

    If the pump raises (an engine has died) the thread is abandoned: it is a daemon and holds nothing of the run.
    """
    done = threading.Event()
    outcome: list[T] = []
    raised: list[BaseException] = []

    def body() -> None:
        try:
            outcome.append(work())
        except BaseException as err:
            raised.append(err)
        finally:
            done.set()

    threading.Thread(target=body, name="controller task", daemon=True).start()
    pump(done.is_set)
    if raised:
        raise raised[0]
    return outcome[0]


class BackgroundTasks:
    """The controller's tasks, each run in the background; `pump` is bound when the controller exists."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.pump: Pump | None = None

    def begin(self, iteration: int) -> None:
        self._tasks.begin(iteration)

    def run(self, step: Run, inputs: Mapping[str, Any]) -> Values:
        assert self.pump is not None, "the controller has not started"
        return in_background(lambda: self._tasks.run(step, inputs), self.pump)
