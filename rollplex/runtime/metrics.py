"""Metrics as the run goes on: a line of JSON an iteration, the same to TensorBoard and Weights & Biases, and a picture.

TensorBoard where it is installed, Weights & Biases where the job names a project.

{"iteration": 3, "reward": 0.52, "loss": -0.01, "grad_norm": 0.83, "step_s": 2.1}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Protocol

from rollplex.ir.errors import RunError
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan


class Curves(Protocol):
    """Somewhere that shows curves."""

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One iteration."""
        ...

    def close(self, failed: bool) -> None:
        """No more comes: the run is through with its steps, or has failed."""
        ...


class MetricsWriter:
    """Writes each iteration when it ends, so that a run that is killed loses nothing before that."""

    def __init__(self, folder: Path, before: Sequence[Mapping[str, float]] = (), *curves: Curves) -> None:
        """`before` are the iterations that a resumed run does not repeat; what the file has beyond them goes."""
        path = folder / "metrics.jsonl"
        partial = path.with_suffix(".partial")
        partial.write_text("".join(_line(i, row) for i, row in enumerate(before)), encoding="utf-8")
        partial.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._curves = curves

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        for curves in self._curves:
            curves.close(kind is not None)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One iteration."""
        self._file.write(_line(iteration, metrics))
        for curves in self._curves:
            curves.write(iteration, metrics)


def curves_of(job: Job, folder: Path, first: int) -> tuple[Curves, ...]:
    """Where this run's curves go from iteration `first` on; RunError where the job asks for what is not installed."""
    found: list[Curves] = [TensorBoard(folder, first)] if find_spec("tensorboard") is not None else []
    if job.run.wandb is not None:
        found.append(Wandb(job, folder))
    return tuple(found)


class TensorBoard:
    """Every metric as a scalar of its name; what an earlier part of the run wrote from `first` on is hidden."""

    def __init__(self, folder: Path, first: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first)

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()

    def close(self, failed: bool) -> None:
        self._writer.close()


class Wandb:
    """A run of the project `run.wandb`, the same when it is resumed; WANDB_MODE=offline keeps it on this machine."""

    def __init__(self, job: Job, folder: Path) -> None:
        check_wandb(job)
        wandb, place = import_module("wandb"), str(folder.resolve())
        try:
            self._run = wandb.init(
                project=job.run.wandb,
                dir=place,
                name=folder.name,
                id=sha256(place.encode()).hexdigest()[:16],
                resume="allow",
                config=job.model_dump(mode="json"),
            )
        except wandb.Error as err:  # no key, no network
            hint = "wandb login; or WANDB_MODE=offline, which keeps the curves here until `wandb sync`"
            raise RunError(f"Weights & Biases does not take the run: {err}", where="run.wandb", hint=hint) from None

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=iteration)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


def check_wandb(job: Job) -> None:
    """RunError where the job names a project and the package is not there."""
    if job.run.wandb is not None and find_spec("wandb") is None:
        hint = "pip install wandb, or leave run.wandb out"
        raise RunError("package wandb is not installed", where="run.wandb", hint=hint)


def _line(iteration: int, metrics: Mapping[str, float]) -> str:
    return json.dumps({"iteration": iteration, **metrics}) + "\n"


def watched(plan: Plan) -> str:
    """The metric that a run is watched by: that of its first host function that scores, else of the first such role."""
    judges = (str(r.args[0]) for r in plan.graph if r.op == "rx.suffix" and r.kwargs.get("head") == "score")
    scoring = (r for r in plan.graph if r.name in plan.hosts and r.kwargs.get("returns", "scores") == "scores")
    return next((plan.hosts[r.name] for r in scoring), next(judges, ""))


def draw_curve(rewards: Sequence[float], path: Path, name: str = "reward") -> bool:
    """A PNG of the reward by step with its running mean; False where matplotlib is not installed or nothing to draw."""
    if not rewards or find_spec("matplotlib") is None:
        return False
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(range(1, len(rewards) + 1), rewards, color="0.7", linewidth=1, label="step")
    axes.plot(range(1, len(rewards) + 1), running_mean(rewards, 10), color="C0", linewidth=2, label="mean of 10")
    axes.set_xlabel("step")
    axes.set_ylabel(name)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path)
    return True


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean of the last `width` values at each place."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
