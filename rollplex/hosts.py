"""The Python functions behind a plan's host calls: who binds them, and how they are found.

--host reward=my_rewards.py:exact_answer     on the command line, which comes first
run: {hosts: {reward: rewards.py:exact}}     in the job
HOSTS = {"reward": exact_answer}             in the algorithm's file
rx.host(exact_answer)(prompts, rollout)      the function itself, found by its address
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rollplex.ir.errors import RollplexError, RunError
from rollplex.ir.plan import Plan

HostFunction = Callable[..., Any]
_EXAMPLE = "--host reward=my_rewards.py:exact_answer"


def find(plan: Plan, bound: Mapping[str, Any], given: Sequence[str] = ()) -> dict[str, HostFunction]:
    """Functions by the names the plan has for them; `bound` are the globals of the algorithm's file.

    What nobody binds is left out: the runtime names it. Raises RunError for a binding that leads nowhere.
    """
    found = {name: load(address, f"--host {name}") for name, address in map(_binding, given)}
    _refuse_unknown(found, plan, "--host")
    of_job = {n: a for n, a in plan.job["run"]["hosts"].items() if n not in found}
    found |= {name: load(address, f"run.hosts.{name}") for name, address in of_job.items()}
    _refuse_unknown(of_job, plan, "run.hosts")
    listed = bound.get("HOSTS", {})
    for name in plan.hosts.values():
        if name not in found and name in listed:
            found[name] = listed[name]
        elif name not in found and ":" in name:
            found[name] = _local(name, bound) or load(name, plan.algorithm)
    return found


def _refuse_unknown(names: Iterable[str], plan: Plan, where: str) -> None:
    known = set(plan.hosts.values())
    for name in names:
        if name not in known:
            hint = ", ".join(sorted(known)) or "it calls none"
            raise RunError(f"the algorithm calls no host function `{name}`", where=where, hint=hint)


def _binding(text: str) -> tuple[str, str]:
    name, _, address = text.partition("=")
    if not name or ":" not in address:
        raise RunError(f"`{text}` binds no function", where="--host", hint=_EXAMPLE)
    return name, address


def _local(address: str, bound: Mapping[str, Any]) -> HostFunction | None:
    """A function of the algorithm's file itself, or one that it imported."""
    place, _, name = address.rpartition(":")
    value = bound.get(name)
    return value if callable(value) and getattr(value, "__module__", None) == place else None


def load(address: str, where: str) -> HostFunction:
    """The function at `module:function` or `file.py:function`; RunError when it is not there."""
    place, _, name = address.rpartition(":")
    try:
        module = _execute(Path(place), where) if place.endswith(".py") else importlib.import_module(place)
    except RollplexError:
        raise
    except Exception as error:  # whatever the user's module raises while it is imported
        raise RunError(f"cannot import {place}: {type(error).__name__}: {error}", where=where) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise RunError(f"{place} has no function `{name}`", where=where, hint=_EXAMPLE)
    return function


def _execute(file: Path, where: str) -> ModuleType:
    """Run a file as a module of its own, its folder importable meanwhile."""
    if not file.is_file():
        raise RunError(f"there is no file {file}", where=where, hint=_EXAMPLE)
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(file.resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(file.resolve().parent))
    return module
