"""What `rollplex explain` prints: one object and the price of having it elsewhere, or what makes the peak."""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from rich.text import Text

from rollplex.ir.explanation import Effect, Explanation, Move
from rollplex.ir.plan import Plan
from rollplex.show.memory import by_size
from rollplex.show.text import LABEL, WIDTH, clip, labelled, line, seconds, size, table, under, unit_for


def explained_lines(found: Explanation, plan: Plan, width: int = WIDTH) -> list[Text]:
    """What it is, its size and what moves that, where it is and why, what others cost, its part in the peak."""
    o = found.object
    kind = f"{o.class_}{', attached to autograd' if o.attached else ''}"
    held = f"held by the {o.process} process{' for ' + o.role if o.role else ''}"
    lines = labelled("object", f"{o.name}, {o.title}: {size(o.bytes)} a GPU, {kind}, {held}", width)
    lines += under(o.why, width) if o.why else []
    return [
        *lines,
        *_formula(found, width),
        *_rows("size", [_effect(e) for e in found.effects] or [("no number of the job moves it", "", "")], width),
        *_rows("where", [(s.window, s.place, s.why) for s in found.stays], width),
        *_rows("elsewhere", [_price(m) for m in found.moves if not m.refused], width),
        *_rows("not legal", _refusals(found), width),
        *_rows("peak", [_to_the_peak(plan, o.name)], width),
        *(labelled("note", found.note, width) if found.note else []),
    ]


def _formula(found: Explanation, width: int) -> list[Text]:
    """The bytes as a formula, and below it what its named parts are."""
    formula, nbytes = found.formula, found.object.bytes
    if formula is None:
        return labelled("formula", "none in words comes to these bytes; the keys below move them", width)
    pages = "" if formula.value == nbytes else ", and the rest of a page"
    lines = labelled("formula", f"{formula} = {size(formula.value)}{pages}", width)
    for name, what in formula.parts():
        lines += under(f"{name} = {what} = {what.value:,}", width)
    return lines


def _rows(label: str, rows: list[tuple[str, str, str]], width: int) -> list[Text]:
    """Two aligned columns and a text that goes on below itself."""
    if not rows:
        return []
    heads = table([row[:2] for row in rows])
    indent = max(map(len, heads)) + 2
    room = width - LABEL - indent
    lines: list[Text] = []
    for head, (_, _, text) in zip(heads, rows, strict=True):
        for i, part in enumerate(textwrap.wrap(text, room) or [""]):
            left = f"{'' if lines else label:<{LABEL}}"
            body = f"{head if i == 0 else '':<{indent}}{part}".rstrip()
            lines.append(line((left, "bold"), clip(body, width - LABEL)))
    return lines


def _effect(e: Effect) -> tuple[str, str, str]:
    return e.key, f"{e.old} -> {e.new}", size(e.nbytes)


def _price(m: Move) -> tuple[str, str, str]:
    price = f"step {_signed(m.exposed_s, seconds)}, peak {_signed(m.peak_bytes, size)}, "
    over = f"; {size(m.over_bytes)} over capacity" if m.over_bytes else ""
    return m.window, m.place, f"{price}moved {_signed(m.moved_bytes, size)} a step{over}"


def _refusals(found: Explanation) -> list[tuple[str, str, str]]:
    """Windows with the same reason stand together."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for m in (m for m in found.moves if m.refused):
        reasons.setdefault((m.place, m.refused), []).append(m.window)
    return [(place, "", f"{why} ({', '.join(windows)})") for (place, why), windows in reasons.items()]


def _signed(value: float, shown: Callable[[float], str]) -> str:
    return f"{'-' if value < 0 else '+'}{shown(abs(value))}"


# ---- the peak


def _to_the_peak(plan: Plan, name: str) -> tuple[str, str, str]:
    held = next(w for w in plan.summary.windows if w.name == plan.summary.peak_window)
    peak, window = next_peak(plan, name)
    if name not in held.by_object:
        return held.name, "", "it is not in HBM at the peak"
    return held.name, "", f"without it the peak would be {size(peak)} in {window}"


def next_peak(plan: Plan, name: str) -> tuple[int, str]:
    """The largest window if an object's bytes were nowhere in HBM, over all pools of GPUs."""
    pools = [p.name for p in plan.summary.pools]
    sums = [
        (sum(n for o, n in w.by_object.items() if o != name and plan.pool_of(o) == pool), w.name)
        for w in plan.summary.windows
        for pool in pools
    ]
    return max(sums, key=lambda pair: pair[0])


def peak_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """The objects of the fullest window by size, with the peak that would be left if each were gone."""
    s = plan.summary
    window = next(w for w in s.windows if w.name == s.peak_window)
    pool = next(p.name for p in s.pools if p.peak_hbm_bytes == s.peak_hbm_bytes)
    here = by_size((o, n) for o, n in window.by_object.items() if plan.pool_of(o) == pool)
    unit = unit_for([s.capacity_bytes])
    head = f"{unit.named(s.peak_hbm_bytes)} of {unit.named(s.capacity_bytes)} in {window.name}"
    rows = [("object", unit.name, "next peak", "in", "title")]
    for name, nbytes in here:
        left, where = next_peak(plan, name)
        rows.append((name, unit(nbytes), unit(left), where, plan.object(name).title))
    lines = [clip(text, width - LABEL) for text in table(rows, right=(1, 2))]
    styled = [line((" " * LABEL + text, "bold" if i == 0 else "")) for i, text in enumerate(lines)]
    return [*labelled("peak", head, width), *styled]
