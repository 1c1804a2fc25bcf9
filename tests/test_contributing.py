"""The recipes of CONTRIBUTING.md, followed to the letter: what they tell a contributor to write works."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rollplex.backends
import rollplex.passes
from rollplex import api

ROOT = Path(__file__).resolve().parent.parent
JOB = ROOT / "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"


def blocks(heading: str) -> list[str]:
    """The Python blocks of a section of CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    return ["\n".join(line.removeprefix("   ") for line in block.splitlines()) + "\n" for block in found]


@pytest.fixture
def fresh_modules() -> Iterator[None]:
    """Modules that a recipe adds are gone afterwards."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.endswith(("count_wide", ".half", ".half.facts")):
            del sys.modules[name]


@pytest.mark.usefixtures("fresh_modules")
def test_add_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass of the recipe passes the test of the recipe."""
    source, test = blocks("Add a pass")
    (tmp_path / "count_wide.py").write_text(source)
    monkeypatch.setattr(rollplex.passes, "__path__", [*rollplex.passes.__path__, str(tmp_path)])
    space = {"__file__": str(ROOT / "tests/test_count_wide.py"), "__name__": "test_count_wide"}
    exec(compile(test, "test_count_wide.py", "exec"), space)
    space["test_scores_are_not_wide_and_ratios_are"]()  # type: ignore[operator]


@pytest.mark.usefixtures("fresh_modules")
def test_a_pass_of_ones_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`passes=(*default_pipeline(), CountWide())` compiles, and the pass is reported under its name."""
    from rollplex.ir.job import load_job
    from rollplex.ir.loading import load_algorithm
    from rollplex.passes.pipeline import compile_plan, default_pipeline

    (tmp_path / "count_wide.py").write_text(blocks("Add a pass")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    extra = importlib.import_module("count_wide").CountWide()
    ran: list[str] = []
    algorithm = load_algorithm(ROOT / "examples/grpo.py")
    compile_plan(
        algorithm, load_job(JOB), passes=(*default_pipeline(), extra), on_pass=lambda report: ran.append(report.name)
    )
    assert ran[-1] == "count-wide"


@pytest.mark.usefixtures("fresh_modules")
def test_add_a_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with facts is found by its name, and the plan's sizes are its own."""
    folder = tmp_path / "half"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "facts.py").write_text(blocks("Add a backend")[0])
    monkeypatch.setattr(rollplex.backends, "__path__", [*rollplex.backends.__path__, str(tmp_path)])
    grpo = str(ROOT / "examples/grpo.py")
    whole, half = (
        api.compile_files(grpo, JOB, [f"roles.actor.train.engine={e}"]).plan.object("actor.prefix_saved").bytes
        for e in ("megatron", "half")
    )
    assert half == pytest.approx(whole / 2, rel=0.01)


def test_add_an_algorithm(tmp_path: Path) -> None:
    """RLOO compiles and fits, its prefixes run during decode, and its loss is the formula of its paper."""
    from rollplex.ir.records import evaluate

    (tmp_path / "rloo.py").write_text(blocks("Add an algorithm")[0])
    plan = api.compile_files(str(tmp_path / "rloo.py"), JOB, ["workload.group=4"]).plan
    assert plan.feasible
    assert {r.phase for r in plan.graph if r.op == "rx.prefix"} == {"P1"}
    torch.manual_seed(0)
    logp, ref = torch.randn(2, 3, 4, 5).unbind(0)[:2]
    score, mask = torch.randn(3, 4), torch.rand(3, 4, 5) < 0.7
    others = (score.sum(1, keepdim=True) - score) / 3
    terms = -logp * (score - others)[:, :, None] + 0.02 * (logp - ref)
    given = {"logp": logp, "ref_logp": ref, "score": score, "rollout": {"mask": mask}}
    found = evaluate(plan.graph, given, ["loss"])["loss"]
    torch.testing.assert_close(found, terms[mask].mean())
