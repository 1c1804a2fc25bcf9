"""What the page of H200s needs before it is measured: plans of another checkout, data, a GPU and its driver."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from h200_runs import two_gpu_plan, write_plans

from benchmarks.driver import Driver, nvml
from benchmarks.h200 import make, plans, setup, table
from benchmarks.h200.plans import PLACE, ROOT, arrived, carried
from rollplex.ir.errors import RunError

# ---- what is there before


def test_a_plan_travels_to_another_checkout(tmp_path: Path) -> None:
    """Its text names no place, and finds files of ours where it arrives."""
    plan = two_gpu_plan()
    text = carried(plan)
    assert str(ROOT) + "/benchmarks" not in text
    assert f"{PLACE}/benchmarks/h200/reward.py:even" in text
    ready = setup.prepare(write_plans(tmp_path / "plans", **{"0_serial": plan}), tmp_path / "here")
    assert [each.name for each in ready] == ["0 serial"]
    assert ready[0].plan == plan
    assert arrived(text) == plan.to_json()


def test_a_directory_without_plans_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="there is no plan in this directory\n    try: python -m benchmarks"):
        setup.prepare(tmp_path, tmp_path / "here")


def test_what_a_plan_reads_is_made_where_it_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model's config, a data set by its name; weights by a program of their own; another's data set is not ours."""
    for module in (make, setup):
        monkeypatch.setattr(module, "HERE", tmp_path)
    calls: list[list[str]] = []
    monkeypatch.setattr(setup, "called", lambda command, log: calls.append(list(command)))
    small = two_gpu_plan().job
    job = small | {"model": {**small["model"], "name": str(tmp_path / "small")}}
    job |= {
        "run": {**small["run"], "data": str(tmp_path / "data" / "text_mixed.jsonl"), "weights": str(tmp_path / "w")}
    }
    setup.fill([setup.Job.model_validate(job)])
    assert (tmp_path / "small" / "config.json").exists()
    rows = [json.loads(line) for line in (tmp_path / "data" / "text_mixed.jsonl").read_text().splitlines()]
    assert [len(row["response_lengths"]) for row in rows] == [make.GROUP] * make.STEP
    assert calls == [["benchmarks.h200.weights", str(tmp_path / "small"), str(tmp_path / "w")]]
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "model.safetensors").touch()
    setup.fill([setup.Job.model_validate(job)])
    assert len(calls) == 2  # interrupted: weights without the file that is written last
    (tmp_path / "w" / "config.json").touch()
    setup.fill([setup.Job.model_validate(job)])
    assert len(calls) == 2
    job["run"]["data"] = str(tmp_path / "other.jsonl")
    with pytest.raises(RunError, match=r"other\.jsonl: there is no such data set"):
        setup.fill([setup.Job.model_validate(job)])


def test_a_plan_that_fits_no_gpu_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of it would be refused where time on a GPU is paid for."""
    monkeypatch.setattr(sys, "argv", ["plans", str(tmp_path), "--job", "job_x2", "cluster.capacity_gib=3 GiB"])
    with pytest.raises(RunError, match=r"job_x2\.yaml: soak has a peak of \d+\.\d GiB, more than a GPU has"):
        plans.main()
    assert not list(tmp_path.iterdir())


def test_only_the_plans_that_are_named_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was measured of the others stays theirs; a number that is none is refused."""
    monkeypatch.setattr(sys, "argv", ["plans", str(tmp_path), "--job", "job_3b", "--only", "3", "--only", "7"])
    with pytest.raises(RunError, match=r"--only: there is no plan 7\n    try: one of 0, 1, 2, 3, 4, 5"):
        plans.main()
    monkeypatch.setattr(sys, "argv", ["plans", str(tmp_path), "--job", "job_3b", "--only", "3"])
    plans.main()  # not without a calibration
    assert list(tmp_path.iterdir()) == []


# ---- without a GPU


@pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia[0-9]"))), reason="this machine has a GPU")
def test_without_a_gpu_the_program_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, before anything is begun; no traceback."""
    monkeypatch.setattr(sys, "argv", ["table", str(tmp_path), "--runs", str(tmp_path / "runs")])
    with pytest.raises(SystemExit, match="2"):
        table.main()
    said = capsys.readouterr().err
    assert said.startswith("error      GPU: ")
    assert "try: run where there is a GPU, with package nvidia-ml-py installed" in said
    assert not (tmp_path / "runs").exists()
    with pytest.raises(RunError):
        Driver(0)


def test_a_management_library_that_does_not_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        class NVMLError(Exception):
            pass

        def nvmlInit(self) -> None:
            raise self.NVMLError("Driver Not Loaded")

    monkeypatch.setattr("benchmarks.driver.import_module", lambda name: Library())
    with pytest.raises(RunError, match="GPU: NVML does not answer: Driver Not Loaded"):
        nvml()


def test_multicast_stays_off_in_whatever_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable is set where it was not, and what the user has set stays; children inherit it."""
    for before, after in (("", None), ("0", "0"), ("1", "1")):
        monkeypatch.setattr(sys, "argv", ["table", "nowhere"])
        monkeypatch.delenv(table.MULTICAST, raising=False) if not before else monkeypatch.setenv(
            table.MULTICAST, before
        )
        with pytest.raises(SystemExit):
            table.main()
        assert table.os.environ[table.MULTICAST] == (after or "0")
