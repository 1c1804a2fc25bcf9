"""Passes of other packages: where they stand, and what is said about one that is of no use."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from distributions import distribution, visible

from rollplex import api
from rollplex.ir.errors import PluginError
from rollplex.passes.pipeline import full_pipeline

ROOT = Path(__file__).resolve().parent.parent
GRPO, JOB = str(ROOT / "examples/grpo.py"), ROOT / "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"

PASS = '''\
"""A module of somebody else's."""
from dataclasses import dataclass
from typing import ClassVar

@dataclass(frozen=True)
class Seen{name}:
    made_by = "{name}"

@dataclass(frozen=True)
class Look{name}:
    """Look at it. Always."""

    name: ClassVar[str] = "{name}"
    after: ClassVar[str] = "{after}"
    makes: ClassVar[type] = Seen{name}

    def run(self, module):
        return module.put(Seen{name}())
'''
Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Make packages `their-NAME`, each with the pass NAME in module `their_NAME`, from (NAME, text) pairs."""

    def make(*passes: tuple[str, str]) -> None:
        for name, text in passes:
            monkeypatch.delitem(sys.modules, f"their_{name}", raising=False)
            points = {"rollplex.passes": {name: f"their_{name}:Look{name}"}}
            distribution(tmp_path, f"their-{name}", points, {f"their_{name}": text})
        visible(tmp_path, monkeypatch)

    return make


def a_pass(name: str, after: str = "layout") -> tuple[str, str]:
    return name, PASS.format(name=name, after=after)


def names() -> list[str]:
    return [p.name for p in full_pipeline()]


def test_each_stands_behind_the_pass_it_names(install: Install) -> None:
    """Several behind one by their names, and one behind another that is not ours either."""
    install(a_pass("b"), a_pass("a"), a_pass("c", after="a"), a_pass("z", after="lower"))
    line = names()
    assert line[line.index("layout") :][:5] == ["layout", "a", "c", "b", "hold-sizes"]
    assert line[-1] == "z"
    row = next(r for r in api.pass_rows() if r.name == "a")
    assert (row.makes, row.does, row.package) == ("Seena", "Look at it. Always.", "their-a")


def test_without_them_the_pipeline_is_ours(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """ROLLPLEX_DISABLE=all is what to try when one is suspected."""
    install(a_pass("a"))
    monkeypatch.setenv("ROLLPLEX_DISABLE", "all")
    assert "a" not in names()


def changed(old: str, new: str, after: str = "layout") -> str:
    text = PASS.format(name="a", after=after)
    assert old in text
    return text.replace(old, new)


REFUSED = {
    "an import that fails": ("import nothing_of_this_name", "cannot be loaded: ModuleNotFoundError: No module named"),
    "not Python": ("def def", "cannot be loaded: SyntaxError: "),
    "no such object": ("x = 1", "cannot be loaded: AttributeError: module 'their_a' has no attribute 'Looka'"),
    "not a pass": ("Looka = 3", "int is no pass, it lacks `name`, its name as a text; `after`, the name of the pass"),
    "no after": (changed('    after: ClassVar[str] = "layout"\n', ""), "Looka is no pass, it lacks `after`, the name"),
    "options with no default": (
        changed("    name: Cl", "    x: int\n    name: Cl"),
        "cannot be made without options: ",
    ),
    "another name": (changed('name: ClassVar[str] = "a"', 'name: ClassVar[str] = "b"'), "its pass is named `b`"),
    "unknown after": (PASS.format(name="a", after="laiout"), "stands after `laiout`, and no such pass runs"),
    "a name of ours": (None, "a pass named `layout` is built in"),
    "a fact of ours": (
        "from rollplex.passes.layout import Layout\n" + changed("= Seena", "= Layout"),
        "`layout` makes the fact Layout already",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_pass_of_no_use_is_refused_by_its_package(case: str, install: Install) -> None:
    """What is wrong, the distribution and its entry point, and how to go without it."""
    text, what = REFUSED[case]
    name = "a" if text else "layout"
    install((name, text or PASS.format(name="layout", after="layout")))
    with pytest.raises(PluginError) as error:
        full_pipeline()
    (problem,) = error.value.problems
    assert problem.where == f"their-{name} 1.2, entry point rollplex.passes: {name} = their_{name}:Look{name}"
    assert problem.what.startswith(what)
    assert problem.hint.endswith(f"or go without it: ROLLPLEX_DISABLE=their-{name}")


RUNS = {
    "raises": ("return module.put(Seena())", "return 1 / 0", "failed: ZeroDivisionError: division by zero"),
    "returns nothing": ("return module.put(Seena())", "pass", "its run gave no module with the fact Seena"),
    "makes no fact": ("return module.put(Seena())", "return module", "its run gave no module with the fact Seena"),
    "breaks the graph": (
        "return module.put(Seena())",
        "import copy\n        g = copy.deepcopy(module.graph)\n        next(iter(g.nodes)).meta.clear()\n"
        "        return module.with_graph(g).put(Seena())",
        "left a graph that is none: prompts: %prompts has no line of the user's file",
    ),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_pass_that_fails_is_told_as_its_packages_mistake(case: str, install: Install) -> None:
    """No traceback, and nobody thinks it is ours."""
    old, new, what = RUNS[case]
    install(("a", changed(old, new)))
    with pytest.raises(PluginError, match=r"their-a 1\.2, entry point") as error:
        api.compile_files(GRPO, JOB)
    assert error.value.problems[0].what.startswith(what)


def test_a_broken_package_spoils_no_list_of_packages(install: Install) -> None:
    """`rollplex plugins` is how to find out, so it lists the broken ones too."""
    install(a_pass("a"), ("b", "import nothing_of_this_name"))
    rows = {r.name: r for r in api.plugin_rows()}
    assert rows["a"].problem == ""
    assert rows["b"].package == "their-b 1.2"
    assert rows["b"].problem.startswith("cannot be loaded: ModuleNotFoundError")
