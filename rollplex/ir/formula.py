"""A size in words and numbers: sums, products and ratios of named whole numbers that evaluate and print.

f = n(8, "prompts") * n(8192, "tokens") * n(64, "layers") * n(2, "B") + n(3, "B")
f.value == 8388611    str(f) == "8 prompts x 8192 tokens x 64 layers x 2 B + 3 B"

A part may have a name of its own: it stands by its name where it is used, and `parts` lists it with what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["number", "sum", "less", "product", "over", "up", "largest", "part"]


@dataclass(frozen=True)
class Formula:
    """A node: a number, or what is made of its `terms`; `label` is the number's noun or the part's name."""

    kind: Kind
    terms: tuple[Formula, ...] = ()
    number: int = 0
    label: str = ""

    def __add__(self, other: Formula) -> Formula:
        """The sum; a term that is nothing is left out."""
        terms = tuple(t for side in (self, other) for t in (side.terms if side.kind == "sum" else (side,)) if t.value)
        return terms[0] if len(terms) == 1 else Formula("sum", terms)

    def __sub__(self, other: Formula) -> Formula:
        """The difference."""
        return Formula("less", (self, other))

    def __mul__(self, other: Formula) -> Formula:
        """The product; a factor of one that says nothing is left out."""
        factors = tuple(t for f in (self, other) for t in (f.terms if f.kind == "product" else (f,)) if t != ONE)
        return factors[0] if len(factors) == 1 else Formula("product", factors)

    def __floordiv__(self, ways: int) -> Formula:
        """The ratio, rounded down; of one way the formula itself."""
        return self if ways == 1 else Formula("over", (self,), ways)

    @property
    def value(self) -> int:
        """The number it comes to."""
        values = [t.value for t in self.terms]
        match self.kind:
            case "number":
                return self.number
            case "sum":
                return sum(values)
            case "less":
                return values[0] - values[1]
            case "product":
                return math.prod(values)
            case "over":
                return values[0] // self.number
            case "up":
                return -(-values[0] // self.number)
            case "largest" | "part":
                return max(values)

    def __str__(self) -> str:
        texts = [str(t) for t in self.terms]
        closed = [f"({t})" if term.kind in ("sum", "less") else t for t, term in zip(texts, self.terms, strict=True)]
        match self.kind:
            case "number":
                return f"{self.number} {self.label}".rstrip()
            case "sum":
                return " + ".join(texts)
            case "less":
                return f"{texts[0]} - {texts[1] if self.terms[1].kind != 'sum' else closed[1]}"
            case "product":
                return " x ".join(closed)
            case "over":
                exact = self.terms[0].value % self.number == 0
                return f"{closed[0]} / {self.number}" if exact else f"floor({closed[0]} / {self.number})"
            case "up":
                return f"ceil({closed[0]} / {self.number})"
            case "largest":
                return f"max({', '.join(texts)})"
            case "part":
                return self.label

    def parts(self) -> Iterator[tuple[str, Formula]]:
        """Named parts with what they are, each once, before the parts that they are made of."""
        found: dict[str, Formula] = {}
        for name, what in self._named():
            assert found.setdefault(name, what) == what, f"`{name}` stands for two things"
        yield from found.items()

    def _named(self) -> Iterator[tuple[str, Formula]]:
        for term in self.terms:
            if self.kind == "part":
                yield self.label, term
            yield from term._named()


ONE = Formula("number", number=1)


def n(number: int, label: str = "") -> Formula:
    """A whole number with its noun."""
    return Formula("number", number=number, label=label)


def part(name: str, what: Formula) -> Formula:
    """A formula that is told apart under a name of its own; a lone number needs none."""
    return what if what.kind == "number" else Formula("part", (what,), label=name)


def up(what: Formula, ways: int) -> Formula:
    """The ratio, rounded up."""
    return what if ways == 1 else Formula("up", (what,), ways)


def largest(*terms: Formula) -> Formula:
    """The largest of these that are something."""
    some = tuple(t for t in terms if t.value) or terms[:1]
    return some[0] if len(some) == 1 else Formula("largest", some)
