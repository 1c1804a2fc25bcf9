"""What differs between two plans, old and new side by side with signed differences; what is equal is not told.

job        workload.prompts                                32          48
verdict    peak                                   73.27 GiB   83.64 GiB   +10.37 GiB
moved      reference BF16 weights   P1 decode          host         hbm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.text import Text

from rollplex.ir.plan import Plan, PlannedObject
from rollplex.show.text import LABEL, WIDTH, clip, line, seconds, size, table

Row = tuple[str, str, str, str]
"""What, old, new, signed difference."""
NONE = "-"


def difference_lines(old: Plan, new: Plan, width: int = WIDTH) -> list[Text]:
    """Aligned lines under the name of their section; none when the plans say the same."""
    found = [(name, list(rows(old, new))) for name, rows in _SECTIONS]
    every = [row for _, rows in found for row in rows]
    if not every:
        return []
    narrow = [(clip(a, 44), clip(b, 20), clip(c, 20), d) for a, b, c, d in every]
    texts = iter(table(narrow, right=(1, 2, 3), gap=2))
    lines: list[Text] = []
    for name, rows in found:
        for i, _ in enumerate(rows):
            lines.append(line((f"{name if i == 0 else '':<{LABEL}}", "bold"), clip(next(texts), width - LABEL)))
    return lines


def _changed(what: str, old: object, new: object) -> Iterator[Row]:
    if old != new:
        yield what, _word(old), _word(new), ""


def _word(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _amount(what: str, old: float | None, new: float | None, shown: Callable[[float], str]) -> Iterator[Row]:
    """A figure that changed, or stands in one plan alone."""
    if old == new:
        return
    sides = (NONE if v is None else shown(v) for v in (old, new))
    by = "" if old is None or new is None else f"{'+' if new > old else '-'}{shown(abs(new - old))}"
    yield (what, *sides, by)  # pyright: ignore[reportReturnType]  (two sides)


# ---- sections


def _job(old: Plan, new: Plan) -> Iterator[Row]:
    """Keys of the job, flat: `roles.actor.train.tensor_parallel`."""
    before, after = dict(_flat(old.job)), dict(_flat(new.job))
    for key in dict.fromkeys((*before, *after)):
        yield from _changed(key, before.get(key), after.get(key))
    yield from _changed("algorithm", old.algorithm, new.algorithm)
    if old.graph != new.graph:
        changed = len({r.name for r in old.graph} ^ {r.name for r in new.graph})
        yield "graph", f"{len(old.graph)} nodes", f"{len(new.graph)} nodes", f"{changed} names" if changed else ""


def _flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, object]]:
    for key, value in section.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _verdict(old: Plan, new: Plan) -> Iterator[Row]:
    a, b = old.summary, new.summary
    yield from _changed("fits", old.feasible, new.feasible)
    yield from _amount("capacity", a.capacity_bytes, b.capacity_bytes, size)
    yield from _amount("peak", a.peak_hbm_bytes, b.peak_hbm_bytes, size)
    yield from _changed("peak in", a.peak_window, b.peak_window)
    yield from _amount("peak of the host pool", a.peak_host_bytes, b.peak_host_bytes, size)
    over = [p.infeasible.shortfall_bytes if p.infeasible else 0 for p in (old, new)]
    yield from _amount("over in the first window", over[0], over[1], size)


def _windows(old: Plan, new: Plan) -> Iterator[Row]:
    before, after = ({w.name: w for w in p.summary.windows} for p in (old, new))
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name), after.get(name)
        yield from _amount(name, a and a.hbm_bytes, b and b.hbm_bytes, size)
        yield from _amount(f"{name}, host", a and a.host_bytes, b and b.host_bytes, size)
        yield from _amount(f"{name}, time", a and a.seconds, b and b.seconds, seconds)


def _objects(old: Plan, new: Plan) -> Iterator[Row]:
    """Added, removed, resized."""
    before, after = _by_name(old), _by_name(new)
    for name in dict.fromkeys((*before, *after)):
        a, b = before.get(name), after.get(name)
        yield from _amount(name, a and a.bytes, b and b.bytes, size)
        if a and b:
            for what in ("class_", "attached", "slots"):
                yield from _changed(f"{name}, {what.rstrip('_')}", getattr(a, what), getattr(b, what))


def _moved(old: Plan, new: Plan) -> Iterator[Row]:
    """Objects that both plans have and that are elsewhere in a window that both have."""
    before, after = _by_name(old), _by_name(new)
    for name in (n for n in before if n in after):
        a, b = before[name].residency, after[name].residency
        for window in (w for w in a if w in b):
            yield from _changed(f"{name} in {window}", a[window], b[window])


def _by_name(plan: Plan) -> dict[str, PlannedObject]:
    return {o.name: o for o in plan.summary.objects}


def _times(old: Plan, new: Plan) -> Iterator[Row]:
    before, after = old.summary.times.model_dump(), new.summary.times.model_dump()
    for key in before:
        shown = seconds if key.endswith("_s") else lambda v: f"{v:.3f}x"
        yield from _amount(key.removesuffix("_s").replace("_", " "), before[key], after.get(key), shown)


def _decisions(old: Plan, new: Plan) -> Iterator[Row]:
    """Layout, chunks, policy, as the file has them, but for lists of many rows."""
    for section in ("layout", "chunks", "policy"):
        sides = [
            dict(_flat(getattr(p.summary, section).model_dump(exclude={"tensors", "alternatives"}))) for p in (old, new)
        ]
        for key in dict.fromkeys((*sides[0], *sides[1])):
            a, b = (side.get(key) for side in sides)
            what = f"{section} {key.replace('_', ' ')}"
            if key.endswith("bytes") and isinstance(a, int) and isinstance(b, int):
                yield from _amount(what.removesuffix(" bytes"), a, b, size)
            else:
                yield from _changed(what, a, b)


def _programs(old: Plan, new: Plan) -> Iterator[Row]:
    for process in dict.fromkeys((*old.programs, *new.programs)):
        a, b = old.programs.get(process), new.programs.get(process)
        if a != b:
            counts = (NONE if steps is None else f"{len(steps)} steps" for steps in (a, b))
            yield (f"program of {process}", *counts, "")  # pyright: ignore[reportReturnType]  (two counts)


_SECTIONS: tuple[tuple[str, Callable[[Plan, Plan], Iterator[Row]]], ...] = (
    ("job", _job),
    ("verdict", _verdict),
    ("windows", _windows),
    ("objects", _objects),
    ("moved", _moved),
    ("decisions", _decisions),
    ("times", _times),
    ("programs", _programs),
)
