"""A whole run: refuse what can be refused, start the engines, iterate, save, report.

    result = run_plan(plan, hosts={"reward": exact_answer}, out_dir=Path("runs/a"), progress=print)
    result.report.rewards        result.digests["actor.master"]        result.final / "model.safetensors"

    run_plan(plan, .., out_dir=Path("runs/a"), resume=True)        goes on from the newest whole checkpoint

However it ends, no process is left, and the metrics, the report and the trace of what was done are on disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollplex.backends.memory.ledger import Ledger
from rollplex.backends.memory.table import HOST
from rollplex.ir.engines import engine_module
from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.placement import training_seat
from rollplex.ir.plan import Plan
from rollplex.runtime import checkpoint
from rollplex.runtime.background import BackgroundTasks
from rollplex.runtime.controller import Controller, peers_of
from rollplex.runtime.crew import Crew
from rollplex.runtime.events import (
    CheckpointWritten,
    EnginesReady,
    IterationDone,
    Progress,
    Resumed,
    Stopping,
    silent,
)
from rollplex.runtime.feed import Feed
from rollplex.runtime.gathering import agreed_digests, merged_metrics
from rollplex.runtime.interrupt import Interrupt
from rollplex.runtime.memorylog import MemoryLog
from rollplex.runtime.metrics import MetricsWriter, check_wandb, curves_of, draw_curve, watched
from rollplex.runtime.openfiles import raise_limit
from rollplex.runtime.preflight import HOST_FUNCTION, check_hosts, check_machine, check_plan, make_feed
from rollplex.runtime.protocol import CONTROLLER, Ask, ProcessId
from rollplex.runtime.report import Report, TimeLog, write_report
from rollplex.runtime.resume import Beginning, begin_at, store_plan
from rollplex.runtime.rundir import run_directory
from rollplex.runtime.sampling import sampled_groups
from rollplex.runtime.sharing import sharing
from rollplex.runtime.stages import Stages
from rollplex.runtime.trace import TraceFile


@dataclass(frozen=True)
class RunResult:
    """What a complete run leaves: `digests` are those of all training state, `facts` what engines state."""

    report: Report
    digests: dict[str, str]
    facts: dict[ProcessId, dict[str, Any]]
    out_dir: Path
    final: Path


def run_plan(
    plan: Plan,
    *,
    hosts: Mapping[str, HOST_FUNCTION],
    out_dir: Path,
    progress: Progress = silent,
    resume: bool = False,
) -> RunResult:
    """Run a plan to its last step, or to the first SIGINT.

    With `resume`, `out_dir` may be that of a run of the same plan which ended early: it goes on to the same bits as one
    that did not.

    Raises PlanError, RunError, DataError, JobError before any process starts; afterwards EngineError for a process
    that died or went silent, and whatever a process reported. A second SIGINT raises KeyboardInterrupt.
    """
    check_plan(plan)
    return execute_plan(plan, hosts=hosts, out_dir=out_dir, progress=progress, resume=resume)


def execute_plan(
    plan: Plan,
    *,
    hosts: Mapping[str, HOST_FUNCTION],
    out_dir: Path,
    progress: Progress = silent,
    resume: bool = False,
) -> RunResult:
    """`run_plan` for a plan that has been checked: what is wrong with it now shows where the arenas refuse it."""
    job = Job.model_validate(plan.job)
    check_machine(plan)
    check_hosts(plan, hosts)
    check_wandb(job)
    raise_limit()  # of the engine processes too, which inherit it
    with run_directory(out_dir, resume):
        begin = begin_at(out_dir, plan)
        feed = make_feed(plan, job, hosts)
        store_plan(out_dir, plan)
        return _Run(plan, job, feed, out_dir, progress, begin).go()


@dataclass
class _Run:
    """One run from its first process to its report."""

    plan: Plan
    job: Job
    feed: Feed
    out_dir: Path
    progress: Progress
    begin: Beginning
    memory: MemoryLog = field(default_factory=MemoryLog)
    saved: int = 0

    def __post_init__(self) -> None:
        self.done = self.saved = self.begin.step
        self.times = TimeLog(self.plan)
        self.stages = Stages(self.progress)
        self.report = Report(self.plan.algorithm, self.plan.schedule, self.job.run.steps)
        self.report.metrics = list(self.begin.metrics)
        self.report.reward = watched(self.plan)

    def go(self) -> RunResult:
        """The engines are gone before anything is written, whether the run ended well or not."""
        controller: Controller | None = None
        try:
            (self.out_dir / "logs").mkdir(exist_ok=True)
            self.stages.begin(CONTROLLER, "starting processes")
            processes = self._processes()
            with (
                TraceFile(self._trace_path(), [CONTROLLER, *processes]) as self.trace,
                sharing(self.job) as variables,
                Crew(processes, self.out_dir / "logs", self.job.run.threads, self._modules(), variables) as crew,
            ):
                tasks = BackgroundTasks(self.feed)
                controller = Controller(self.plan, self.job, crew, tasks, self.progress, self.stages)
                tasks.pump = controller.pump
                try:
                    result = self._drive(controller)
                except BaseException:
                    with suppress(OSError):
                        self.trace.write(controller.timeline.take(), controller.reports)
                    raise
            self.stages.begin(CONTROLLER, "")
            self._write()
            return result
        except BaseException as err:
            checkpoint.clear_partial(self.out_dir)  # engines wrote on until they were gone
            self.report.ended = f"{type(err).__name__}: {err}".splitlines()[0]
            if controller is not None:
                with suppress(OSError):  # a full disk must not hide why the run ended
                    self._write()
            if isinstance(err, OSError):
                what = f"cannot write the results of the run: {err.strerror}"
                raise RunError(what, where=err.filename or self.out_dir, hint="free space on this disk") from None
            raise

    def _processes(self) -> list[ProcessId]:
        kinds = {kind: p for kind, p in self.plan.processes.items() if kind != "controller"}
        return [ProcessId(kind, rank) for kind, process in kinds.items() for rank in range(process.ranks)]

    def _modules(self) -> set[str]:
        """What the engine processes import before they are forked; a process that has looked at a GPU cannot fork."""
        if not self.job.on_host:
            return set()
        return {engine_module(p.engine) for kind, p in self.plan.processes.items() if kind != "controller"}

    def _drive(self, controller: Controller) -> RunResult:
        self.stages.begin(CONTROLLER, "")
        with ExitStack() as stack, TemporaryDirectory(prefix="rollplex-") as meeting:
            ledgers = [self._ledgers(gpu) for gpu in range(self.job.gpus)]
            for ledger in chain.from_iterable(ledgers):
                stack.enter_context(closing(ledger))
            controller.start(partial(self._handed, ledgers), Path(meeting))
        if self.begin.folder is not None:
            controller.restore(self.begin.folder)
        if self.begin.folder is not None or self.begin.skipped:
            self.progress(Resumed(self.begin.step, tuple(self.begin.skipped)))
        self.progress(EnginesReady(self.job.run.steps))
        self._iterate(controller)
        self.stages.phase = "end"
        self.stages.begin(CONTROLLER, "digests of all state")
        digests = agreed_digests(self.job, controller.ask(Ask("digests")))
        self.stages.begin(CONTROLLER, "writing final/")
        final = self._save(controller)
        self.stages.begin(CONTROLLER, "stopping engines")
        controller.stop()
        return RunResult(self.report, digests, controller.facts, self.out_dir, final)

    def _ledgers(self, gpu: int) -> tuple[Ledger, Ledger]:
        """What counts the bytes of one GPU, and of its share of the pinned pool."""
        summary = self.plan.summary
        return (
            Ledger.create(f"device {gpu}", summary.capacity_bytes, self.job.device.page_bytes, process="controller"),
            Ledger.create(HOST, summary.host_capacity_bytes, process="controller"),
        )

    def _handed(self, ledgers: Sequence[tuple[Ledger, Ledger]], process: ProcessId) -> list[int]:
        """Descriptors for a process: of its GPU's ledgers, and of those of the GPUs whose pages it writes into."""
        others = peers_of(self.plan, self.job, process, f"{self.job.policy}.snapshot")
        return [ledger.export() for ledger in (*ledgers[process.rank], *(ledgers[peer.rank][0] for peer in others))]

    def _iterate(self, controller: Controller) -> None:
        curves = curves_of(self.job, self.out_dir, self.done)
        with (
            MetricsWriter(self.out_dir, self.begin.metrics, *curves) as writer,
            Interrupt(lambda: self.progress(Stopping(self.done))) as interrupt,
        ):
            while self.done < self.job.run.steps and not interrupt.asked:
                started = time.monotonic()
                controller.iteration(self.done)
                self._note(controller, writer, time.monotonic() - started)
                if self.job.run.checkpoint_every and self.done % self.job.run.checkpoint_every == 0:
                    self._checkpoint(controller)
            if self.job.run.checkpoint_every and self.saved < self.done:
                self._checkpoint(controller)
            if interrupt.asked:
                self.report.ended = "interrupted"

    def _note(self, controller: Controller, writer: MetricsWriter, seconds: float) -> None:
        metrics = self.feed.metrics | merged_metrics(controller.reports.values()) | {"step_s": seconds}
        spans = controller.timeline.take()
        self.times.add(spans, seconds)
        self.memory.add(controller.reports)
        self.trace.write(spans, controller.reports)
        controller.reports.clear()
        self._log_failures()
        self.report.metrics.append(metrics)
        writer.write(self.done, metrics)
        self.done += 1
        self.progress(IterationDone(self.done - 1, self.job.run.steps, metrics))

    def _log_failures(self) -> None:
        """Calls of host functions that failed and counted as a score."""
        if self.feed.failures:
            with (self.out_dir / "logs" / "host.log").open("a", encoding="utf-8") as log:
                log.writelines(f"iteration {self.done}, {what}\n" for what in self.feed.failures)

    def _checkpoint(self, controller: Controller) -> None:
        started = time.monotonic()
        checkpoint.write(self.out_dir, self.done, self.begin.plan, self.report.metrics, controller.checkpoint)
        checkpoint.prune(self.out_dir, self.job.run.checkpoints_kept)
        self.saved = self.done
        self.progress(CheckpointWritten(self.done, time.monotonic() - started))

    def _trace_path(self) -> Path:
        """A resumed run leaves the trace of its earlier part as it is."""
        return self.out_dir / (f"trace-from-{self.begin.step}.json" if self.begin.step else "trace.json")

    def _save(self, controller: Controller) -> Path:
        """The actor as a Hugging Face directory: written beside its place, then renamed, so that it is whole or not."""
        partial, final = self.out_dir / "final.partial", self.out_dir / "final"
        shutil.rmtree(partial, ignore_errors=True)
        controller.ask(Ask("save", str(partial)), of=self._holds_a_part)
        self.feed.maker.tokenizer.save_pretrained(str(partial))
        shutil.rmtree(final, ignore_errors=True)  # of the run that this one goes on with
        partial.rename(final)
        return final

    def _holds_a_part(self, process: ProcessId) -> bool:
        """Whether it is a rank of the first copy of the model: each has a part of it."""
        return process.kind == "train" and training_seat(self.job, process.rank).copy == 0

    def _write(self) -> None:
        """What is known now."""
        report = self.report
        report.steps_done = self.done
        report.sampling = sampled_groups(self.job, report.metrics)
        report.step_s, report.times, report.overlap = self.times.step_s, self.times.windows(), self.times.overlap
        report.steps, report.stages = self.times.steps, self.stages.found
        if self.done > self.begin.step:
            report.memory, report.objects = self.memory.windows(self.plan), self.memory.objects(self.plan)
            report.pieces, report.places = self.memory.pieces(self.plan), self.memory.places(self.plan)
        write_report(report, self.out_dir / "report.json")
        draw_curve(report.rewards, self.out_dir / "reward.png", report.reward or "reward")
