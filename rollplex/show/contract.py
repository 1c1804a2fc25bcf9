"""The state contract: one line an object, where it is in every window, where it is made and where it is used.

state contract, GiB a GPU                     P1                   P2           P3
                                              prefix prefix decode score  train update publish
                                              refer. actor         refer. actor
  actor BF16 snapshot     15.26  regenerable  hbm*   hbm*   hbm*   hbm    hbm*  hbm*   hbm*
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from rollplex.ir.plan import Plan, PlannedObject, Residency, WindowSummary
from rollplex.show.parts import in_parts
from rollplex.show.text import WIDTH, Unit, clip, line, unit_for

_TITLE, _BYTES, _CLASS = 28, 7, 11  # the title's column is as wide as the longest title, up to this
_LEAST = 6  # characters of a window's column: `host*` and a blank
_SHORT: dict[Residency, str] = {"hbm": "hbm", "host": "host", "dropped": "drop", "-": "-"}
_STYLE: dict[Residency, str] = {"hbm": "green", "host": "blue", "dropped": "magenta", "-": "dim"}
PARTS = "   part: comes or goes in parts"
LEGEND = "* used, + made in this window   drop: to be made again   - nowhere   a: attached to autograd"


@dataclass(frozen=True)
class _Columns:
    """Where the columns of one block of windows stand."""

    title: int
    windows: tuple[tuple[WindowSummary, int], ...]
    parts: frozenset[tuple[str, str]] = frozenset()
    """Objects and the windows in which they come or go part by part."""

    @property
    def left(self) -> int:
        """Everything before the windows: indent, title, bytes, class, the mark of autograd."""
        return 2 + self.title + _BYTES + 2 + _CLASS + 3


def contract_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """The contract, cut into blocks of windows when there are too many for one line."""
    objects, windows = plan.summary.objects, plan.summary.windows
    unit = unit_for(o.bytes for o in objects)
    title = min(max((len(o.title) for o in objects), default=0), _TITLE)
    room = width - _Columns(title, ()).left
    parts = in_parts(plan)
    lines: list[Text] = []
    for block in _blocks(windows, room):
        name = "  the same, later windows" if lines else f"state contract, {unit.name} a GPU"
        lines += _block(plan, name, _Columns(title, tuple(zip(block, _widths(block, room), strict=True)), parts), unit)
    return [*lines, line((LEGEND + (PARTS if parts else ""), "dim"))]


def _blocks(windows: Sequence[WindowSummary], room: int) -> Iterator[Sequence[WindowSummary]]:
    most = max(room // _LEAST, 1)
    return (windows[i : i + most] for i in range(0, len(windows), most))


def _widths(windows: Sequence[WindowSummary], room: int) -> list[int]:
    """As wide as the whole names need if there is room, else as the work's name needs, else the least."""
    for parts in ((1, 2), (1,), ()):
        widths = [max(_LEAST, 1 + max((len(_words(w)[k]) for k in parts), default=0)) for w in windows]
        if sum(widths) - 1 <= room:
            return widths
    return widths


def _words(w: WindowSummary) -> tuple[str, str, str, str]:
    """`P1 prefix-actor.2` in its parts: phase, work, role, and of a later turn `turn2`."""
    name, _, turn = w.name.removeprefix(w.phase).strip().partition(".")
    work, _, role = name.partition("-")
    return w.phase, work, role, f"turn{turn}" if turn else ""


def _block(plan: Plan, name: str, columns: _Columns, unit: Unit) -> list[Text]:
    heads = _heads(columns)
    lines = [line((f"{name:<{columns.left}}", "bold"), (heads[0], "bold"))]
    lines += [line(" " * columns.left, (head, "bold")) for head in heads[1:] if head]
    return lines + [_row(o, columns, unit) for o in plan.summary.objects]


def _heads(columns: _Columns) -> list[str]:
    """Lines over the columns: the phase where it begins, the work, the role, and of several turns the turn."""
    rows, phase = ["", "", "", ""], ""
    for w, column in columns.windows:
        shown = ("" if w.phase == phase else w.phase, *_words(w)[1:])
        rows = [row + clip(word, column - 1).ljust(column) for row, word in zip(rows, shown, strict=True)]
        phase = w.phase
    return [row.rstrip() for row in rows]


def _row(o: PlannedObject, columns: _Columns, unit: Unit) -> Text:
    title, nbytes = clip(o.title, columns.title).ljust(columns.title), clip(unit(o.bytes), _BYTES).rjust(_BYTES)
    left = f"  {title}{nbytes}  {o.class_:<{_CLASS}} {'a' if o.attached else ' '} "
    cells = ((_place(o, w.name, (o.name, w.name) in columns.parts), w, column) for w, column in columns.windows)
    made = line(left, *((place.ljust(column), _style(o, w.name)) for place, w, column in cells))
    made.rstrip()
    return made


def _place(o: PlannedObject, window: str, parts: bool) -> str:
    """Where an object is in a window, or that it comes in parts; `*` where it is used, `+` where it is made."""
    mark = "+" if window == o.produced else "*" if window in o.consumed else ""
    return ("part" if parts else _SHORT[o.residency.get(window, "-")]) + mark


def _style(o: PlannedObject, window: str) -> str:
    return _STYLE[o.residency.get(window, "-")]
