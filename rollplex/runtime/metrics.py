"""Metrics as the run goes on: a line of JSON an iteration, the same to TensorBoard if it is installed, and a picture.

{"iteration": 3, "reward": 0.52, "loss": -0.01, "grad_norm": 0.83, "step_s": 2.1}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from rollplex.ir.plan import Plan


class MetricsWriter:
    """Writes each iteration when it ends, so that a run that is killed loses nothing before that."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        self._board = _tensorboard(folder)

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def write(self, iteration: int, metrics: Mapping[str, float]) -> None:
        """One iteration."""
        self._file.write(json.dumps({"iteration": iteration, **metrics}) + "\n")
        if self._board is not None:
            for name, value in metrics.items():
                self._board.add_scalar(name, value, iteration)
            self._board.flush()


def _tensorboard(folder: Path) -> Any:
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"))


def watched(plan: Plan) -> str:
    """The metric that a run is watched by: its first host function's, else that of the first role that scores."""
    judges = (str(r.args[0]) for r in plan.graph if r.op == "rx.suffix" and r.kwargs.get("head") == "score")
    return next(iter(plan.hosts.values()), next(judges, ""))


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
