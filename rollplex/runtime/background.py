"""Work of the controller that takes long (decoding videos, the user's reward) while it keeps an eye on the engines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from torch import Tensor

from rollplex.backends.carried import Carried
from rollplex.backends.engine import Tasks, Values
from rollplex.ir.steps import Run

T = TypeVar("T")
Pump = Callable[[Callable[[], bool]], None]


class Later(Generic[T]):
    """The outcome of work that runs in a thread of its own; a daemon, so that nothing waits for it at exit."""

    def __init__(self, work: Callable[[], T], name: str) -> None:
        self._work = work
        self._done = threading.Event()
        self._value: list[T] = []
        self._raised: BaseException | None = None
        threading.Thread(target=self._run, name=name, daemon=True).start()

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or not."""
        return self._done.is_set()

    def result(self) -> T:
        """The value, or what the work raised; blocks until the work ends (the caller pumps where that may be long)."""
        self._done.wait()
        if self._raised is not None:
            raise self._raised
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as err:
            self._raised = err
        finally:
            self._done.set()


class BackgroundTasks:
    """The controller's tasks, each run in the background; `pump` is bound when the controller exists.

    If the pump raises (an engine has died), the task's thread is abandoned: it holds nothing of the run.
    """

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.pump: Pump | None = None

    def begin(self, iteration: int) -> None:
        self._tasks.begin(iteration)

    def run(self, step: Run, inputs: Mapping[str, Any]) -> Values:
        assert self.pump is not None, "the controller has not started"
        outcome = Later(lambda: self._tasks.run(step, inputs), "controller task")
        self.pump(lambda: outcome.done)
        return outcome.result()

    def carried(self) -> Carried:
        return self._tasks.carried()

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._tasks.restore(tensors, facts)
