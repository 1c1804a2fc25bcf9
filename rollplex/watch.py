"""Progress of long work on stderr: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from rollplex.ir.errors import Problem
from rollplex.ir.plan import Plan
from rollplex.runtime.calibrate.grid import Grid
from rollplex.runtime.events import (
    CheckpointWritten,
    EnginesReady,
    IterationDone,
    Resumed,
    RunEvent,
    StageBegun,
    Started,
    StepEntered,
    Stopping,
)
from rollplex.runtime.metrics import watched

LINES = 10  # lines of a whole run in a log


class RunWatch:
    """Call it with what a run tells; use it as a context. `saved` is the step behind which the run can go on."""

    def __init__(self, plan: Plan, console: Console) -> None:
        self.steps, self.console = int(plan.job["run"]["steps"]), console
        self.reward = watched(plan)
        self.saved: int | None = None
        self._column = max(len(w.name) for w in plan.summary.windows)
        self._bar: Progress | None = None
        self._task = None

    def __enter__(self) -> RunWatch:
        if self.console.is_terminal:
            self._bar = Progress(
                TextColumn(f"{{task.description:<{self._column}}}"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=self.console,
                transient=True,
            )
            self._task = self._bar.add_task("starting", total=self.steps, note="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: RunEvent) -> None:
        """Show one event."""
        match event:
            case Started(pids):
                self._say(f"{len(pids)} engine processes started")
            case Resumed(step, skipped):
                self._resumed(step, skipped)
            case StageBegun(process, stage):
                self._say(f"{process!s:<12} {stage}")
            case EnginesReady():
                self._update(description="training")
            case StepEntered(process, _, step) if process.kind == "train":
                self._update(description=step.window)
            case IterationDone(iteration, steps, metrics):
                self._done(iteration + 1, steps, dict(metrics))
            case CheckpointWritten(step):
                self.saved = step
            case Stopping():
                self._say("interrupted: the run ends after this step; press Ctrl-C again to end it at once")
            case _:
                pass

    def _resumed(self, step: int, skipped: tuple[Problem, ...]) -> None:
        for problem in skipped:
            self._say(f"skipped {problem}")
        self.saved = step
        self._say(f"going on after step {step} of {self.steps}")
        self._update(completed=step)

    def _done(self, done: int, steps: int, metrics: dict[str, float]) -> None:
        note = f"{self.reward} {metrics[self.reward]:.3f}" if self.reward in metrics else ""
        self._update(completed=done, note=note)
        if self._bar is None and (done == 1 or done == steps or done * LINES // steps > (done - 1) * LINES // steps):
            self.console.print(f"step {done:>4} of {steps}  {note}  {metrics.get('step_s', 0.0):.2f} s".rstrip())

    def _update(self, **fields: object) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, **fields)  # type: ignore[arg-type]

    def _say(self, text: str) -> None:
        (self._bar.console if self._bar is not None else self.console).print(text)


class CalibrationWatch:
    """Every figure of a calibration as a line, under them a bar on a terminal; use it as a context."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def begin(self, grid: Grid) -> None:
        """So many figures are to come."""
        batches, chunks, sms = (" ".join(map(str, n)) for n in (grid.batches, grid.chunks, grid.sms))
        gpus = f"{grid.gpus} GPUs  " if grid.gpus > 1 else ""
        self.console.print(f"measuring  {gpus}decode batches {batches}  prefix chunks {chunks}  SMs {sms}")
        if self.console.is_terminal:
            self._bar = Progress(BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn(), transient=True)
            self._task = self._bar.add_task("", total=grid.figures)
            self._bar.start()

    def tell(self, what: str, figure: str) -> None:
        """One more figure."""
        (self._bar.console if self._bar else self.console).print(f"{what:<52} {figure}")
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> CalibrationWatch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()
