"""examples/package, built and installed beside Rollplex without a network: its pass runs, its algorithm compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "examples/package"
GRPO, JOB = "examples/grpo.py", "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
BUILD = "from setuptools import build_meta; print(build_meta.build_wheel('dist'))"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as pip would leave it: the package's wheel, made from a copy of its sources, and unpacked."""
    folder = tmp_path_factory.mktemp("package")
    source = shutil.copytree(PACKAGE, folder / "source")
    built = subprocess.run([sys.executable, "-c", BUILD], cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(source / "dist" / built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def python(site: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the package installed."""
    path = os.pathsep.join([str(site), str(ROOT)])
    given = {**os.environ, "PYTHONPATH": path, "COLUMNS": "100", **env}
    return subprocess.run([sys.executable, *argv], env=given, cwd=ROOT, capture_output=True, text=True, check=False)


def rollplex(site: Path, *argv: str, **env: str) -> str:
    """The output of a command that must succeed."""
    done = python(site, "-m", "rollplex", *argv, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_its_pass_is_listed_where_it_stands(site: Path) -> None:
    """After share-prefix, with the package it is from."""
    out = rollplex(site, "passes")
    assert " 4  shared-tokens  Savings" in out
    assert "(of rollplex-example)" in out
    listed = [line.split() for line in rollplex(site, "plugins").splitlines()]
    assert ["rollplex.passes", "shared-tokens", "rollplex-example", "0.1.0", "ok"] in listed
    assert ["rollplex.algorithms", "dr_grpo", "rollplex-example", "0.1.0", "ok"] in listed


def test_compile_runs_it_and_prints_its_fact(site: Path) -> None:
    """--print-after knows it like any other pass, and so does --time."""
    out = rollplex(site, "compile", GRPO, "--job", JOB, "--print-after", "shared-tokens", "--time")
    assert "actor        32 prefixes of up to 8192 tokens, each read 8 times:  1.84 M tokens" in out
    assert any(line.startswith("shared-tokens  ") for line in out.splitlines())
    assert "FITS" in out


def test_its_algorithm_compiles_by_name(site: Path) -> None:
    """`rollplex compile dr_grpo`; a wrong name gets the right one."""
    out = rollplex(site, "compile", "dr_grpo", "--job", "examples/package/job.yaml", "--plan-only")
    assert "rollplex   dr_grpo.py x job.yaml" in out
    wrong = python(site, "-m", "rollplex", "compile", "dr_gpro", "--job", "examples/package/job.yaml")
    assert wrong.returncode == 2
    assert "no installed algorithm of this name\n  try: did you mean `dr_grpo`?" in wrong.stderr


def test_it_can_be_left_out(site: Path) -> None:
    """The pass by --passes, the package by ROLLPLEX_DISABLE."""
    out = rollplex(site, "compile", GRPO, "--job", JOB, "--passes", "-shared-tokens", "--time")
    assert "shared-tokens" not in out
    assert "shared-tokens" not in rollplex(site, "passes", ROLLPLEX_DISABLE="rollplex-example")


def test_its_own_test_passes(site: Path) -> None:
    """What the package promises its users."""
    done = python(site, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(PACKAGE), str(PACKAGE / "tests"))
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout
