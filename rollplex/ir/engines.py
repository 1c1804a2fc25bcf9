"""Which engines there are and what each is for, by name: those in rollplex.backends, and those of installed packages.

engine_names("train")     ("host", "megatron")
engine("half")            the FACTS of a package that names `half` as an entry point of rollplex.backends

Nothing here imports a backend: a name leads to it, and only its `facts`, which are arithmetic, are loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rollplex.ir.errors import JobError, PluginError, Problem
from rollplex.ir.plugins import installed

Work = Literal["train", "score", "rollout"]
_HOME = "rollplex.backends"
_DOES: dict[Work, str] = {"train": "trains", "score": "trains", "rollout": "rolls_out"}


def engine(name: str) -> Any:
    """The facts of the engine of this name. JobError lists what is installed; PluginError when it cannot be loaded."""
    if name in _own():
        return importlib.import_module(f"{_HOME}.{name}.facts").FACTS
    plugins = installed("rollplex.backends")
    if name not in plugins:
        known = ", ".join(sorted({*_own(), *plugins}))
        raise JobError(f"no engine `{name}`", hint=f"one of {known}, or install the package that has it")
    facts = plugins[name].load()
    if getattr(facts, "name", None) != name:
        raise plugins[name].refusal(f"{facts!r} is no facts of an engine named `{name}`", "point at a FACTS object")
    return facts


def can(facts: Any, work: Work) -> bool:
    """Whether an engine trains, scores or rolls out."""
    return bool(getattr(facts, _DOES[work], False))


def runs(name: str, cpu: bool) -> bool:
    """Whether `rollplex run` executes an engine where its job is: on GPUs, or as `cpu` processes."""
    return is_so(name, "on_cpu" if cpu else "runs")


def families(name: str) -> frozenset[str] | None:
    """Families of models that an engine of ours runs; None where its facts name none: any."""
    return getattr(engine(name), "families", None)


def lacking(name: str, cpu: bool) -> Problem | None:
    """What an engine lacks on this machine, on GPUs or as `cpu` processes; only its facts look, nothing is imported."""
    find = getattr(engine(name), "lacking", None)
    return find(cpu) if find else None


def is_so(name: str, trait: str) -> bool:
    """Whether an engine's facts say so of it; not where there is no such engine, which is told elsewhere."""
    try:
        return bool(getattr(engine(name), trait, False))
    except (JobError, PluginError):
        return False


def engine_names(work: Work) -> tuple[str, ...]:
    """Names of the engines that can do this work, in order; a broken package that nobody asked for is not offered."""
    return tuple(n for n in sorted({*_own(), *installed("rollplex.backends")}) if _usable(n, work))


def _usable(name: str, work: Work) -> bool:
    try:
        return can(engine(name), work)
    except PluginError:
        return False


def _own() -> tuple[str, ...]:
    """Folders of rollplex.backends with a `facts` module; nothing is imported to find them."""
    home = sys.modules.get(_HOME) or importlib.util.find_spec(_HOME)
    return _in(tuple(getattr(home, "__path__", None) or getattr(home, "submodule_search_locations", None) or ()))


@cache
def _in(folders: tuple[str, ...]) -> tuple[str, ...]:
    """Asked for every section of every job that a remedy tries."""
    return tuple(sorted(p.parent.name for folder in folders for p in Path(folder).glob("*/facts.py")))


def engine_module(engine: str) -> str:
    """The module whose `build` makes an engine's processes."""
    return f"rollplex.backends.{engine}.engine"
