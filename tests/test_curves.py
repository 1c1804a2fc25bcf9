"""Where the metrics of a run go: metrics.jsonl, TensorBoard, Weights & Biases, the printed page; resumed runs too."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from runtime_tiny import luck, tiny_job, tiny_plan

from rollplex.ir.errors import RunError
from rollplex.runtime.metrics import MetricsWriter, TensorBoard, Wandb, curves_of
from rollplex.runtime.printing import print_report
from rollplex.runtime.report import Overlap, Report, WindowBytes, WindowTime
from rollplex.runtime.run import execute_plan

ROWS = [{"reward": 0.5, "loss": -0.25, "grad_norm": 2.0}, {"reward": 0.75, "loss": 0.0, "grad_norm": 1.0}]


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return {n: [(e.step, e.value) for e in found.Scalars(n)] for n in found.Tags()["scalars"]}


def test_every_metric_is_a_curve_of_tensorboard(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, (), *curves_of(tiny_job(), tmp_path, 0)) as writer:
        for i, row in enumerate(ROWS):
            writer.write(i, row)
    assert scalars(tmp_path) == {n: [(i, row[n]) for i, row in enumerate(ROWS)] for n in ROWS[0]}


def test_a_resumed_run_takes_back_what_lies_beyond_its_checkpoint(tmp_path: Path) -> None:
    """Three iterations, the second checkpointed; the third comes again, with another value."""
    with MetricsWriter(tmp_path, (), TensorBoard(tmp_path, 0)) as writer:
        for i, reward in enumerate((0.5, 0.75, 0.875)):
            writer.write(i, {"reward": reward})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "rew')  # the process was killed while it wrote
    with MetricsWriter(tmp_path, [{"reward": 0.5}, {"reward": 0.75}], TensorBoard(tmp_path, 2)) as writer:
        writer.write(2, {"reward": 0.25})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows == [{"iteration": i, "reward": r} for i, r in enumerate((0.5, 0.75, 0.25))]
    assert scalars(tmp_path) == {"reward": [(0, 0.5), (1, 0.75), (2, 0.25)]}


# ---- Weights & Biases


class FakeRun:
    """What `wandb.init` returns, as far as we use it."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished: list[int] = []

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged.append((step, metrics))

    def finish(self, exit_code: int) -> None:
        self.finished.append(exit_code)


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The package's place; a test says what `init` does."""
    module = ModuleType("wandb")
    module.__spec__ = sys.__spec__
    monkeypatch.setattr(module, "Error", type("Error", (Exception,), {}), raising=False)
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_a_project_gets_every_metric_and_a_resumed_run_is_the_same_one(fake_wandb: Any, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = []
    run = FakeRun()

    def init(**options: Any) -> FakeRun:
        asked.append(options)
        return run

    fake_wandb.init = init
    job = tiny_job(run={"wandb": "shapes"})
    with MetricsWriter(tmp_path, (), Wandb(job, tmp_path)) as writer:
        for i, row in enumerate(ROWS):
            writer.write(i, row)
    assert (run.logged, run.finished) == (list(enumerate(ROWS)), [0])
    with pytest.raises(KeyError), MetricsWriter(tmp_path, (), Wandb(job, tmp_path)):
        raise KeyError("what ends the run")
    assert run.finished == [0, 1]
    assert asked[0] == asked[1]
    assert (asked[0]["project"], asked[0]["resume"], asked[0]["dir"]) == ("shapes", "allow", str(tmp_path))
    assert asked[0]["config"]["optimizer"]["lr"] == 1e-3


def test_a_project_that_takes_no_run_is_told_with_what_to_try(fake_wandb: Any, tmp_path: Path) -> None:
    def init(**options: Any) -> None:
        raise fake_wandb.Error("No API key configured.")

    fake_wandb.init = init
    with pytest.raises(RunError, match=r"run\.wandb: .* does not take the run: No API key.*\n.*WANDB_MODE=offline"):
        Wandb(tiny_job(run={"wandb": "shapes"}), tmp_path)


def test_the_package_itself_keeps_a_run_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two parts of one run: each has a file that `wandb sync` sends, with the run's id and every metric."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for i, row in enumerate(ROWS):
        with MetricsWriter(tmp_path, ROWS[:i], Wandb(tiny_job(run={"wandb": "shapes"}), tmp_path)) as writer:
            writer.write(i, row)
    files = sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) in (1, 2)  # folders are named by the second
    assert len({file.name for file in files}) == 1
    for file in files:
        assert all(word in file.read_bytes() for word in (b"shapes", b"reward", b"loss", b"grad_norm"))


def test_a_project_without_the_package_is_refused_before_any_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("rollplex.runtime.metrics.find_spec", lambda name: None)
    plan = tiny_plan(run={"wandb": "shapes"})
    with pytest.raises(RunError, match=r"run\.wandb: package wandb is not installed\n.*pip install wandb"):
        execute_plan(plan, hosts={"reward": luck}, out_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


# ---- the page


def page(report: Report) -> str:
    out = io.StringIO()
    print_report(report, Console(file=out, width=100))
    return out.getvalue()


def test_the_page_sets_seconds_and_bytes_beside_the_prediction_by_window_phase_and_step() -> None:
    shown = Report(
        "grpo.py:grpo", "rollplex", 1, 1,
        times=[
            WindowTime("P1 prefix-actor", "P1", 0.25, 0.5, 0.125), WindowTime("P1 decode", "P1", 0.5, 1.0, 0.25),
            WindowTime("P3 update", "P3", 1.0, 2.0, 0.0),
        ],
        overlap=Overlap(1.0, 0.5, 0.25),
        memory=[WindowBytes("P1 decode", 3 << 20, 2 << 20)],
    )  # fmt: skip
    lines = {line.partition("  ")[0]: line.split()[-5:] for line in page(shown).splitlines()}
    assert lines["P1"][-3:] == ["0.750", "1.500", "0.375"]
    assert lines["P3"][-3:] == ["1.000", "2.000", "0.000"]
    assert lines["step"][-3:] == ["1.750", "3.500", "0.375"]
    (decode,) = (line for line in page(shown).splitlines() if line.startswith("P1 decode"))
    assert decode.split()[2:] == ["0.500", "1.000", "0.250", "3.0", "MiB", "2.0", "MiB"]


def test_the_page_tells_how_many_calls_of_the_reward_failed() -> None:
    shown = Report("grpo.py:grpo", "rollplex", 2, 2, metrics=[{"reward_failures": 2.0}, {"reward_failures": 1.0}])
    assert "failures   3 calls of host functions failed and count as a score: logs/host.log" in page(shown)
