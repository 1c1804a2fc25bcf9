"""The house rules that a machine can see: shape of the code, what is installed, what the documents say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
PACKAGE = sorted(p for p in (ROOT / "rollplex").rglob("*.py"))
SOURCES = sorted(p for d in ("rollplex", "tools", "examples", "tests") for p in (ROOT / d).rglob("*.py"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

# Distribution -> module, where the names differ.
MODULES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "megatron-core": "megatron",
    "cuda-python": "cuda",
    "nvidia-cudnn-frontend": "cudnn",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (n for n in ast.walk(parsed(path)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


# ---- the code


@pytest.mark.parametrize("path", [p for p in SOURCES if p.name != "__init__.py"], ids=name_of)
def test_a_module_starts_with_a_sentence(path: Path) -> None:
    """What a file is for stands on its first line."""
    first = (ast.get_docstring(parsed(path)) or "").partition("\n")[0]
    assert len(first) > 10, f"{name_of(path)} has no sentence on top"


def test_files_and_functions_are_small() -> None:
    """Nine of ten files have at most 300 lines and none has 350; nine of ten functions have at most 35."""
    lines = {name_of(p): len(p.read_text("utf-8").splitlines()) for p in PACKAGE}
    assert not {name: n for name, n in lines.items() if n > 350}
    assert quantiles(lines.values(), n=10)[8] <= 300
    lengths = [(f.end_lineno or f.lineno) - f.lineno + 1 for p in PACKAGE for f in functions(p)]
    assert quantiles(lengths, n=10)[8] <= 35


def test_functions_say_their_types() -> None:
    """Every parameter and every result of the package is annotated."""
    bare = [
        f"{name_of(p)}:{f.lineno} {f.name}"
        for p in PACKAGE
        for f in functions(p)
        for a in [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        if a.annotation is None and a.arg not in ("self", "cls")
    ]
    assert not bare


def test_no_path_of_a_machine() -> None:
    """Nothing refers to a folder that only one machine has."""
    foreign = re.compile(r"/(?:work|root|home|Users)/\w|/tmp/(?!nvidia-mps)\w")
    texts = [*SOURCES, *DOCUMENTS, ROOT / "Makefile", ROOT / ".ci/run", ROOT / "pyproject.toml"]
    texts += [p for p in (ROOT / "examples").rglob("*") if p.suffix in (".yaml", ".json") and "data" not in p.parts]
    found = [name_of(p) for p in texts if p != Path(__file__) and foreign.search(p.read_text("utf-8"))]
    assert not found


# ---- what is installed


def requirements(*groups: str) -> set[str]:
    """Names of the distributions that the core, or an extra, asks for."""
    lists = [PROJECT["dependencies"] if g == "core" else PROJECT["optional-dependencies"][g] for g in groups]
    return {re.split(r"[\[<>=!~ ]", requirement)[0].lower() for one in lists for requirement in one}


def imported(paths: list[Path]) -> set[str]:
    """Top-level modules that these files import, inside functions too."""
    found: set[str] = set()
    for node in (n for p in paths for n in ast.walk(parsed(p))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            found.add((node.module or "").partition(".")[0])
    return found - set(sys.stdlib_module_names) - {"rollplex"}


def test_the_core_asks_for_what_it_imports_and_no_more() -> None:
    """Passes, IR and the command line import the core's dependencies; the host backend's are an extra."""
    optional = [p for p in PACKAGE if {"backends", "runtime"} & set(p.parts)]
    core = {MODULES.get(name, name) for name in requirements("core")}
    assert imported([p for p in PACKAGE if p not in optional]) <= core | {"pydantic_core"}
    assert core <= imported(PACKAGE)
    host = {MODULES.get(name, name) for name in requirements("host")}
    own = {extra: [p for p in optional if p.parent.name == extra] for extra in ("megatron", "vllm", "cuda")}
    shared = [p for p in optional if p.parent.name not in own]
    assert imported(shared) <= core | host | {"pydantic_core"}
    for extra, paths in own.items():
        assert imported(paths) <= core | host | {MODULES.get(name, name) for name in requirements(extra)}


def test_torch_has_a_ceiling_and_torchvision_stays_out() -> None:
    """PyPI's torchvision does not load beside a CPU build of torch, and nothing here needs it."""
    assert "torch>=2.9,<2.14" in PROJECT["dependencies"]
    assert "torchvision" not in requirements("core", "host", "dev")


def test_the_engines_are_extras() -> None:
    """The compiler installs without any engine."""
    assert {"host", "megatron", "vllm", "cuda", "ray", "dev"} == set(PROJECT["optional-dependencies"])
    assert PROJECT["name"] == "rollplex"
    assert "Apache License" in (ROOT / "LICENSE").read_text("utf-8")


# ---- the makefile's helpers


@pytest.fixture
def venv(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tools/venv.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    sys.modules.pop("venv", None)
    import venv

    yield venv
    sys.modules.pop("venv", None)


@pytest.mark.parametrize("version", [(3, 8, 10), (3, 10, 14), (3, 14, 0)])
def test_an_unsuitable_python_is_refused(
    venv: ModuleType, version: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the version that was found and how to choose another."""
    monkeypatch.setattr(sys, "version_info", version)
    with pytest.raises(
        SystemExit, match=rf"needs Python 3\.11 to 3\.13; .* is 3\.{version[1]}\n  try: make demo PYTHON"
    ):
        venv.check_python()


@pytest.mark.parametrize("file", ["precious.txt", "pyvenv.cfg"])
def test_what_make_did_not_make_is_left_alone(venv: ModuleType, tmp_path: Path, file: str) -> None:
    """`make test VENV=src` must not empty src, nor an environment of the user's own."""
    (tmp_path / file).write_text("kept")
    with pytest.raises(SystemExit, match="was not made by make\n  try: remove it"):
        venv.create(str(tmp_path))
    assert (tmp_path / file).exists()


def test_a_ready_environment_is_not_made_again(venv: ModuleType, tmp_path: Path) -> None:
    """The stamp of `dev` satisfies `host` too; a change of the requirements does not."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text("")
    (tmp_path / "made-for-dev").write_text(venv.fingerprint(str(tmp_path)))
    venv.main(str(tmp_path), "host")
    (tmp_path / "made-for-dev").write_text("made of something else")
    with pytest.raises(SystemExit, match="was not made by make"):
        venv.main(str(tmp_path), "host")


def test_a_failed_check_is_remembered() -> None:
    """A check that fails is reported at the end and in the exit status, after the others have run."""
    script = (
        "import check; check.STATIC = (('python', '-c', 'raise SystemExit(3)'), ('python', '-c', '')); check.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "--static"], capture_output=True, text=True, cwd=ROOT / "tools", check=False
    )
    assert done.returncode == 1
    assert [line.split()[0] for line in done.stdout.splitlines()[-2:]] == ["FAILED", "ok"]


# ---- the documents


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(document: Path) -> None:
    """Every relative link of a document is a file of the repository."""
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", document.read_text("utf-8")):
        assert (document.parent / target).exists(), f"{name_of(document)} links to {target}"


@pytest.mark.parametrize("script", ["job_reference.py", "pass_reference.py", "readme_plans.py"])
def test_what_is_printed_in_documents_is_what_is_printed(script: str) -> None:
    """The references of job and passes and the README's plans are the program's own words of today."""
    command = [sys.executable, str(ROOT / "tools" / script), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_every_command_is_documented() -> None:
    """The README names every command."""
    readme = (ROOT / "README.md").read_text("utf-8")
    for command in ("compile", "verify", "run", "calibrate", "passes", "plugins", "models", "gpus", "doctor"):
        assert re.search(rf"rollplex .*\b{command}\b", readme)
