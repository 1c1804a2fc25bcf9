"""Lines of at most a given width: styled pieces, columns, wrapped lists, bars, and bytes in the unit that fits.

unit = unit_for([40e9, 2e9]);  unit.name, unit(40e9) == "GiB", "37.25"
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.text import Text

WIDTH = 100
LABEL = 11  # `memory     `: what stands left of a section
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


@dataclass(frozen=True)
class Unit:
    """A unit of bytes for a whole table, so that its figures can be compared by eye."""

    name: str
    nbytes: int

    def __call__(self, nbytes: float, digits: int = 2) -> str:
        """The number without the unit; something that is not zero never prints as zero."""
        value = nbytes / self.nbytes
        smallest = 10.0**-digits
        if 0 < value < smallest / 2:
            return f"<{smallest:.{digits}f}".replace("0.", ".")
        whole = self.nbytes == 1 or value >= 99_999.5
        return f"{value:.{0 if whole else digits}f}"

    def named(self, nbytes: float, digits: int = 2) -> str:
        """`37.25 GiB`."""
        return f"{self(nbytes, digits)} {self.name}"


def unit_for(nbytes: Iterable[float]) -> Unit:
    """The largest unit in which the largest of these is at least 1."""
    largest = max(nbytes, default=0)
    return next((Unit(n, size) for n, size in _UNITS if largest >= size), Unit("B", 1))


def size(nbytes: float, digits: int = 2) -> str:
    """One size in the unit that fits it: `1.09 GiB`."""
    return unit_for([abs(nbytes)]).named(nbytes, digits)


def seconds(value: float) -> str:
    """`61 s`, `0.36 s`, `48 ms`: as many figures as a prediction deserves."""
    if value == 0 or abs(value) >= 100:
        return f"{value:.0f} s"
    if abs(value) >= 10:
        return f"{value:.1f} s"
    return f"{value:.2f} s" if abs(value) >= 0.1 else f"{value * 1e3:.3g} ms"


def clip(text: str, width: int) -> str:
    """The text, or its beginning and a point."""
    return text if len(text) <= width else text[: max(width - 1, 0)] + "."


def line(*pieces: str | Text | tuple[str, str]) -> Text:
    """A line of plain and (text, style) pieces."""
    return Text.assemble(*pieces)


def labelled(label: str, body: str, width: int = WIDTH, style: str = "") -> list[Text]:
    """`label      body`, wrapped under the body."""
    wrapped = textwrap.wrap(body, width - LABEL, break_long_words=True, break_on_hyphens=False) or [""]
    heads = [label, *[""] * (len(wrapped) - 1)]
    return [
        line((f"{head:<{LABEL}}" if part else head, "bold"), (part, style))
        for head, part in zip(heads, wrapped, strict=True)
    ]


def under(text: str, width: int = WIDTH, style: str = "") -> list[Text]:
    """A continuation of a labelled section."""
    return labelled("", text, width, style)


def joined(parts: Sequence[str], width: int, between: str = " | ") -> list[str]:
    """Parts put in lines of at most `width`; no part is broken unless it is wider than a line."""
    lines: list[str] = []
    for part in (clip(p, width) for p in parts):
        if lines and len(lines[-1]) + len(between) + len(part) <= width:
            lines[-1] += between + part
        else:
            lines.append(part)
    return lines


def table(rows: Sequence[Sequence[str]], right: Iterable[int] = (), gap: int = 2) -> list[str]:
    """Rows of cells as lines with aligned columns; `right` are the columns of numbers."""
    aligned = set(right)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(i: int, text: str) -> str:
        return text.rjust(widths[i]) if i in aligned else text.ljust(widths[i])

    return [(" " * gap).join(cell(i, text) for i, text in enumerate(row)).rstrip() for row in rows]
