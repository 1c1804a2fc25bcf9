"""Every place of a plan edited, one edit at a time: numbers changed, names to others, items deleted and moved.

    summary.windows.*.seconds      +1, -1, x2            programs.train.run:prefix.window    another window of the plan
    programs.train.run:prefix      delete, repeat, swap  summary.objects.*.host_backed       not
    infeasible                     delete                infeasible.resource                 another word of its type
A pattern is a place with its indices left out; a step is called by its kind and task. Of each pattern and way of
editing it, `most` places are taken, drawn with a seed. Nothing here knows a field by its name: what is added to a plan
is edited too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from rollplex.ir.engines import engine_names
from rollplex.ir.hardware import GPUS
from rollplex.ir.job import Job
from rollplex.ir.models import model_names
from rollplex.ir.plan import Plan

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Edit:
    """One edit of a plan as JSON: the place, what is done to it, and the value it becomes."""

    path: Path
    pattern: str
    how: str
    value: Any = None

    def of(self, plan: dict[str, Any]) -> dict[str, Any]:
        """The edited plan; what is not on the way to the place is shared with the good one."""
        return _edited(plan, self.path, self)

    def __str__(self) -> str:
        to = f" to {self.value!r}" if self.how == "other" else ""
        return f"{self.how} {'.'.join(map(str, self.path))}{to}"


def _edited(inner: Any, path: Path, edit: Edit) -> Any:
    copy = dict(inner) if isinstance(inner, dict) else list(inner)
    key = path[0]
    if len(path) > 1:
        copy[key] = _edited(inner[key], path[1:], edit)  # type: ignore[index]
        return copy
    match edit.how:
        case "delete":
            del copy[key]  # type: ignore[arg-type]
        case "repeat":
            copy.insert(key, copy[key])  # type: ignore[union-attr, index]
        case "swap":
            copy[key], copy[key + 1] = copy[key + 1], copy[key]  # type: ignore[index, operator]
        case _:
            copy[key] = edit.value  # type: ignore[index]
    return copy


def edits(plan: dict[str, Any], most: int, seed: int) -> list[Edit]:
    """At most so many edits of each pattern and way, the same for the same seed."""
    values: dict[str, list[Any]] = {}
    places = list(_places(plan, (), ""))
    for _, pattern, value in places:
        if isinstance(value, str) and value not in values.setdefault(pattern, []):
            values[pattern].append(value)
    groups: dict[tuple[str, str], list[Edit]] = {}
    for path, pattern, value in places:
        for edit in _of_place(plan, path, pattern, value, [*values.get(pattern, []), *legal(value)]):
            groups.setdefault((edit.pattern, edit.how), []).append(edit)
    rng = random.Random(seed)
    return [e for found in groups.values() for e in (rng.sample(found, most) if len(found) > most else found)]


def _places(value: Any, path: Path, pattern: str) -> Iterator[tuple[Path, str, Any]]:
    """Every place below a value, containers before what they hold."""
    if path:
        yield path, pattern, value
    match value:
        case dict():
            for key, inner in value.items():
                yield from _places(inner, (*path, key), f"{pattern}.{_named(path, key)}".lstrip("."))
        case list():
            for i, inner in enumerate(value):
                yield from _places(inner, (*path, i), f"{pattern}.{_called(inner)}")


def legal(value: Any) -> list[str]:
    """Other words of the types that a word belongs to: literals of a plan and of a job, models, GPUs, engines."""
    found = [w for words in _vocabulary() if value in words for w in words] if isinstance(value, str) else []
    return [w for w in dict.fromkeys(found) if w != value]


@cache
def _vocabulary() -> tuple[tuple[str, ...], ...]:
    engines = tuple(dict.fromkeys([*engine_names("train"), *engine_names("rollout")]))
    return (*_literals(Plan), *_literals(Job), model_names(), tuple(g.name for g in GPUS), engines)


def _literals(annotation: Any, seen: set[Any] | None = None) -> list[tuple[str, ...]]:
    """Every literal type of words below a model or an annotation."""
    seen = set() if seen is None else seen
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if annotation in seen:
            return []
        seen.add(annotation)
        return [w for f in annotation.model_fields.values() for w in _literals(f.annotation, seen)]
    if get_origin(annotation) is Literal:
        words = get_args(annotation)
        return [words] if all(isinstance(w, str) for w in words) else []
    return [w for inner in get_args(annotation) for w in _literals(inner, seen)]


FREE_KEYS = (
    *("by_object", "residency", "workspace_bytes", "hosts", "kwargs", "placement", "cases", "degrees", "others"),
    *("roles", "losses", "processes", "algorithm", "config", "role_data_parallel", "role_replicas"),
)
"""Dicts whose keys are names of the plan, so that one stands for all."""


def _named(path: Path, key: str) -> str:
    return "*" if path and path[-1] in FREE_KEYS else key


def _called(item: Any) -> str:
    """A step by its kind and task, anything else by a star."""
    kind = item.get("kind", "") if isinstance(item, dict) else ""
    return f"{kind}:{item['task']}" if kind == "run" else kind or "*"


def _of_place(plan: dict[str, Any], path: Path, pattern: str, value: Any, others: list[Any]) -> Iterator[Edit]:
    holder = plan
    for key in path[:-1]:
        holder = holder[key]  # type: ignore[index]
    if isinstance(holder, list):
        yield Edit(path, pattern, "delete")
        yield Edit(path, pattern, "repeat")
        if path[-1] + 1 < len(holder) and holder[path[-1] + 1] != value:  # type: ignore[operator, index]
            yield Edit(path, pattern, "swap")
    else:
        yield Edit(path, pattern, "delete")
    match value:
        case bool():
            yield Edit(path, pattern, "not", not value)
        case int() | float():
            yield Edit(path, pattern, "+1", value + 1)
            if value >= 1:
                yield Edit(path, pattern, "-1", value - 1)
            if value not in (0, 1):
                yield Edit(path, pattern, "x2", value * 2)
            if isinstance(value, float) and value:
                yield Edit(path, pattern, "half", value / 2)
        case None:
            yield Edit(path, pattern, "one", 1)
        case str():
            yield from (Edit(path, pattern, "other", o) for o in [o for o in dict.fromkeys(others) if o != value][:4])
            yield Edit(path, pattern, "longer", value + "x")
