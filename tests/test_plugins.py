"""Entry points of other packages: found, loaded, switched off, and refused by the name of their distribution."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributions import distribution, visible
from job_texts import edited, refusal, write

from rollplex.backends.facts import load_facts
from rollplex.ir.engines import engine_names
from rollplex.ir.errors import JobError, PluginError
from rollplex.ir.job import load_job
from rollplex.ir.plugins import installed

HALF = """\
from dataclasses import dataclass
from rollplex.backends.megatron.facts import MegatronFacts

@dataclass(frozen=True)
class HalfFacts(MegatronFacts):
    name: str = "half"

FACTS = HalfFacts()
"""
HALF_POINT = {"rollplex.backends": {"half": "halved:FACTS"}}
HALF_JOB = edited(
    ("engine: megatron\n      tensor_parallel: 8\n    rollout", "engine: half\n      tensor_parallel: 8\n    rollout")
)


def test_an_engine_of_a_package_may_stand_in_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its name is legal because it is installed, for the work that its facts name."""
    distribution(tmp_path, "rollplex-half", HALF_POINT, {"halved": HALF})
    visible(tmp_path, monkeypatch)
    assert load_job(write(tmp_path, HALF_JOB)).roles["actor"].train.engine == "half"  # type: ignore[union-attr]
    assert load_facts("half").name == "half"
    assert "half" in engine_names("train")
    assert "half" not in engine_names("rollout")


def test_an_engine_that_does_not_do_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer cannot roll out; those that can are named."""
    distribution(tmp_path, "rollplex-half", HALF_POINT, {"halved": HALF})
    visible(tmp_path, monkeypatch)
    error = refusal(tmp_path, edited(("engine: vllm", "engine: half")))
    assert str(error) == "job.yaml:13: no rollout engine `half`\n    try: one of host, vllm"


def test_without_the_package_its_engine_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Switched off by name, however it is spelled, and with `all`."""
    distribution(tmp_path, "rollplex-half", HALF_POINT, {"halved": HALF})
    visible(tmp_path, monkeypatch)
    for value in ("Rollplex_Half", "other, rollplex-half", "all"):
        monkeypatch.setenv("ROLLPLEX_DISABLE", value)
        assert "no train engine `half`" in str(refusal(tmp_path, HALF_JOB))
        with pytest.raises(JobError, match=r"no engine `half`\n    try: one of .*megatron, vllm"):
            load_facts("half")
    monkeypatch.setenv("ROLLPLEX_DISABLE", "other")
    assert load_job(write(tmp_path, HALF_JOB))


BROKEN = {
    "import error": (
        "import no_such_module\n",
        "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'",
    ),
    "exits": ("raise SystemExit('bye')\n", "cannot be loaded: SystemExit: bye"),
    "no object": ("", "cannot be loaded: AttributeError: module 'halved' has no attribute 'FACTS'"),
    "wrong shape": ("FACTS = 3\n", "3 is no facts of an engine named `half`"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_engine_names_its_distribution(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the job's line, with what is wrong and how to go without; it is not offered to anybody else."""
    text, what = BROKEN[case]
    monkeypatch.delitem(__import__("sys").modules, "halved", raising=False)
    distribution(tmp_path, "rollplex-half", HALF_POINT, {"halved": text})
    visible(tmp_path, monkeypatch)
    error = str(refusal(tmp_path, HALF_JOB))
    place = "rollplex-half 1.2, entry point rollplex.backends: half = halved:FACTS"
    assert error.startswith(f"job.yaml:10: engine half: {place}: {what}")
    assert "or go without it: ROLLPLEX_DISABLE=rollplex-half" in error
    assert "half" not in engine_names("train")


def test_two_packages_with_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are named; switching one off settles it."""
    distribution(tmp_path, "rollplex-half", HALF_POINT, {"halved": HALF})
    distribution(tmp_path, "other-half", HALF_POINT, {})
    visible(tmp_path, monkeypatch)
    with pytest.raises(PluginError, match=r"rollplex-half 1\.2, entry point .*: other-half has a `half` too"):
        installed("rollplex.backends")
    monkeypatch.setenv("ROLLPLEX_DISABLE", "other-half")
    assert installed("rollplex.backends")["half"].distribution == "rollplex-half"
