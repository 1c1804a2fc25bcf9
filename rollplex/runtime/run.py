"""A whole run: refuse what can be refused, start the engines, iterate, save, report.

    result = run_plan(plan, hosts={"reward": exact_answer}, out_dir=Path("runs/a"), progress=print)
    result.report.rewards        result.digests["actor.master"]        result.final / "model.safetensors"

However it ends, no process is left, and the metrics, the report and the trace of what was done are on disk.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.table import HOST
from rollplex.ir.engines import engine_module
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import training_seat
from rollplex.ir.plan import Plan
from rollplex.runtime.background import BackgroundTasks
from rollplex.runtime.controller import Controller
from rollplex.runtime.crew import Crew
from rollplex.runtime.events import EnginesReady, IterationDone, Progress, Stopping, silent
from rollplex.runtime.feed import Feed
from rollplex.runtime.gathering import agreed_digests, merged_metrics
from rollplex.runtime.interrupt import Interrupt
from rollplex.runtime.metrics import MetricsWriter, draw_curve, watched
from rollplex.runtime.preflight import HOST_FUNCTION, check_hosts, check_machine, check_plan, make_feed
from rollplex.runtime.protocol import Ask, ProcessId
from rollplex.runtime.report import MemoryLog, Report, measured_overlap, times_by_window, write_report
from rollplex.runtime.rundir import run_directory
from rollplex.runtime.trace import write_trace


@dataclass(frozen=True)
class RunResult:
    """What a complete run leaves: `digests` are sha256 of all training state, `facts` what engines state."""

    report: Report
    digests: dict[str, str]
    facts: dict[ProcessId, dict[str, Any]]
    out_dir: Path
    final: Path


def run_plan(
    plan: Plan, *, hosts: Mapping[str, HOST_FUNCTION], out_dir: Path, progress: Progress = silent
) -> RunResult:
    """Run a plan to its last step, or to the first SIGINT.

    Raises PlanError, RunError, DataError, JobError before any process starts; afterwards EngineError for a process
    that died or went silent, and whatever a process reported. A second SIGINT raises KeyboardInterrupt.
    """
    check_plan(plan)
    return execute_plan(plan, hosts=hosts, out_dir=out_dir, progress=progress)


def execute_plan(
    plan: Plan, *, hosts: Mapping[str, HOST_FUNCTION], out_dir: Path, progress: Progress = silent
) -> RunResult:
    """`run_plan` for a plan that has been checked: what is wrong with it now shows where the arenas refuse it."""
    job = Job.model_validate(plan.job)
    check_machine(plan)
    check_hosts(plan, hosts)
    with run_directory(out_dir):
        feed = make_feed(plan, job, hosts)
        return _Run(plan, job, feed, out_dir, progress).go()


@dataclass
class _Run:
    """One run from its first process to its report."""

    plan: Plan
    job: Job
    feed: Feed
    out_dir: Path
    progress: Progress
    memory: MemoryLog = field(default_factory=MemoryLog)
    done: int = 0

    def __post_init__(self) -> None:
        self.report = Report(self.plan.algorithm, self.plan.schedule, self.job.run.steps)
        self.report.reward = watched(self.plan)

    def go(self) -> RunResult:
        """The engines are gone before anything is written, whether the run ended well or not."""
        controller: Controller | None = None
        try:
            (self.out_dir / "logs").mkdir()
            with Crew(self._processes(), self.out_dir / "logs", self.job.run.threads, self._modules()) as crew:
                tasks = BackgroundTasks(self.feed)
                controller = Controller(self.plan, self.job, crew, tasks, self.progress)
                tasks.pump = controller.pump
                result = self._drive(controller)
            self._write(controller)
            return result
        except BaseException as err:
            self.report.ended = f"{type(err).__name__}: {err}".splitlines()[0]
            if controller is not None:
                with suppress(OSError):  # a full disk must not hide why the run ended
                    self._write(controller)
            if isinstance(err, OSError):
                what = f"cannot write the results of the run: {err.strerror}"
                raise RunError(what, where=err.filename or self.out_dir, hint="free space on this disk") from None
            raise

    def _processes(self) -> list[ProcessId]:
        kinds = {kind: p for kind, p in self.plan.processes.items() if kind != "controller"}
        return [ProcessId(kind, rank) for kind, process in kinds.items() for rank in range(process.ranks)]

    def _modules(self) -> set[str]:
        """What the engine processes import."""
        return {engine_module(p.engine) for kind, p in self.plan.processes.items() if kind != "controller"}

    def _drive(self, controller: Controller) -> RunResult:
        with ExitStack() as stack, TemporaryDirectory(prefix="rollplex-") as meeting:
            ledgers = [self._ledgers(gpu) for gpu in range(self.job.gpus)]
            for ledger in chain.from_iterable(ledgers):
                stack.enter_context(closing(ledger))
            controller.start(lambda gpu: [ledger.export() for ledger in ledgers[gpu]], Path(meeting))
        self.progress(EnginesReady(self.job.run.steps))
        self._iterate(controller)
        digests = agreed_digests(self.job, controller.ask(Ask("digests")))
        final = self._save(controller)
        controller.stop()
        return RunResult(self.report, digests, controller.facts, self.out_dir, final)

    def _ledgers(self, gpu: int) -> tuple[Ledger, Ledger]:
        """What counts the bytes of one GPU, and of its share of the pinned pool."""
        summary = self.plan.summary
        return (
            Ledger.create(f"device {gpu}", summary.capacity_bytes, process="controller"),
            Ledger.create(HOST, summary.host_capacity_bytes, process="controller"),
        )

    def _iterate(self, controller: Controller) -> None:
        with (
            MetricsWriter(self.out_dir) as writer,
            Interrupt(lambda: self.progress(Stopping(self.done))) as interrupt,
        ):
            while self.done < self.job.run.steps and not interrupt.asked:
                started = time.monotonic()
                controller.iteration(self.done)
                self._note(controller, writer, time.monotonic() - started)
            if interrupt.asked:
                self.report.ended = "interrupted"

    def _note(self, controller: Controller, writer: MetricsWriter, seconds: float) -> None:
        metrics = self.feed.metrics | merged_metrics(controller.reports.values()) | {"step_s": seconds}
        self.memory.add(controller.reports)
        self.report.metrics.append(metrics)
        writer.write(self.done, metrics)
        self.done += 1
        self.progress(IterationDone(self.done - 1, self.job.run.steps, metrics))

    def _save(self, controller: Controller) -> Path:
        """The actor as a Hugging Face directory: written beside its place, then renamed, so that it is whole or not."""
        partial, final = self.out_dir / "final.partial", self.out_dir / "final"
        controller.ask(Ask("save", str(partial)), of=self._holds_a_part)
        self.feed.maker.tokenizer.save_pretrained(str(partial))
        partial.rename(final)
        return final

    def _holds_a_part(self, process: ProcessId) -> bool:
        """Whether it is a rank of the first copy of the model: each has a part of it."""
        return process.kind == "train" and training_seat(self.job, process.rank).copy == 0

    def _write(self, controller: Controller) -> None:
        """What is known now; the first iteration, in which workspaces are measured, is left out of the times."""
        report, spans = self.report, controller.timeline.spans
        report.steps_done = self.done
        first = 1 if self.done > 1 else 0
        report.step_s = fmean(row["step_s"] for row in report.metrics[first:]) if report.metrics else 0.0
        timed = [span for span in spans if first <= span.iteration < self.done]
        report.times = times_by_window(self.plan, timed)
        report.overlap = measured_overlap(timed)
        if self.done:
            report.memory, report.objects = self.memory.windows(self.plan), self.memory.objects(self.plan)
        write_trace(spans, self.out_dir / "trace.json", controller.timeline.lanes)
        write_report(report, self.out_dir / "report.json")
        draw_curve(report.rewards, self.out_dir / "reward.png", report.reward or "reward")
