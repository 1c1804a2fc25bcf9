"""Public reports as jobs: the verdict that would have saved the run, in words and figures; no false `fits`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cases.judge import HERE, Outcome, confusion, judge
from cases.table import CASES, Case

from rollplex.ir.errors import JobError
from rollplex.ir.job import load_job

FILES = sorted(p.stem for p in HERE.glob("*.yaml"))


def test_every_file_is_a_case_and_says_where_it_is_from() -> None:
    """A header with the source, what was observed, and nothing but our own words."""
    assert sorted(c.file for c in CASES) == FILES
    for name in FILES:
        head = [line for line in (HERE / f"{name}.yaml").read_text("utf-8").splitlines() if line.startswith("#")]
        assert re.search(r"(Observed: |Reported as working)", "\n".join(head)), name


def test_the_table_asks_for_no_false_fits() -> None:
    """What failed is refused, infeasible or warned of, unless it is said why it is no failure here."""
    assert not [c.file for c in CASES if c.false_fits]


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.file)
def test_case(case: Case) -> None:
    """The verdict, its words, its figures."""
    found = judge(case)
    assert not found.false_fits, found.text
    assert found.verdict == case.verdict, found.text
    flat = " ".join(found.text.split())
    assert not [words for words in case.says if words not in flat], found.text
    check_figures(found)


def check_figures(found: Outcome) -> None:
    """Each within the share of it that is stated beside it."""
    for figure in found.case.figures:
        assert found.plan is not None
        assert figure.read(found.plan) == pytest.approx(figure.value, rel=figure.within, abs=0), figure.what


def test_the_matrix_counts_false_fits() -> None:
    """A case that fits and failed is counted, one that is excused is not."""
    failed = next(c for c in CASES if c.observed == "failed" and not c.ours_now)
    excused = next(c for c in CASES if c.ours_now)
    lines = list(confusion([Outcome(failed, "fits", "", None), Outcome(excused, "fits", "", None)]))
    assert lines[1].split() == ["failed", "0", "0", "0", "1"]
    assert lines[-1].endswith("false fits: 1")
    assert any(line.startswith(f"left out: {excused.file}") for line in lines)


ALL_AT_ONCE = """\
model: Qwen2.5-7B
cluster: {gpu: A100-80, gpus_per_node: 6, nodes: 1, host_memory_gb: 1000}
roles:
  actor:
    train:
      tensor_parallel: 3
    rollout:
      tensor_parallel: 6
      kv_cache_gib: 20
      max_model_len: 1024
workload:
  prompts: 511
  prompt_tokens: 1024
  response_tokens: 1024
"""


def test_static_mistakes_come_in_one_message(tmp_path: Path) -> None:
    """Rows 26, 27, 28 and 30 in one file, each at its line, before anything is solved."""
    job = tmp_path / "job.yaml"
    job.write_text(ALL_AT_ONCE)
    with pytest.raises(JobError) as error:
        load_job(job)
    told = {(p.where, p.what.partition(":")[0].partition(" (")[0]) for p in error.value.problems}
    assert told >= {
        ("job.yaml:6", "tensor_parallel 3 does not divide the 28 attention heads"),
        ("job.yaml:8", "tensor_parallel 6 does not divide the 28 attention heads"),
        ("job.yaml:8", "q = 3 / 6 = 1/2"),
        ("job.yaml:10", "max_model_len 1024 is less than 1024 + 1024 tokens"),
        ("job.yaml:12", "511 prompts do not divide over actor's 2 data-parallel ranks"),
    }
