"""Parameters of an algorithm as numbers that remember how they were written, so that a graph prints as its source.

clip = number(0.2, "clip"); 1 - clip == 0.8; written(1 - clip) == "1 - clip"
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

# How tightly an expression binds, as Python has it; the printer shares the scale.
COMPARE, OR, XOR, AND, SUM, PRODUCT, UNARY, POWER, ATOM = range(1, 10)

# Names in Python's operator module: the symbol, and how tightly it binds.
BINARY_SYMBOLS: Mapping[str, tuple[str, int]] = {
    "add": ("+", SUM),
    "sub": ("-", SUM),
    "mul": ("*", PRODUCT),
    "truediv": ("/", PRODUCT),
    "floordiv": ("//", PRODUCT),
    "mod": ("%", PRODUCT),
    "pow": ("**", POWER),
    "and_": ("&", AND),
    "xor": ("^", XOR),
    "or_": ("|", OR),
    "eq": ("==", COMPARE),
    "ne": ("!=", COMPARE),
    "lt": ("<", COMPARE),
    "le": ("<=", COMPARE),
    "gt": (">", COMPARE),
    "ge": (">=", COMPARE),
}
UNARY_SYMBOLS: Mapping[str, str] = {"neg": "-", "pos": "+", "invert": "~"}


class Float(float):
    """A float parameter, or arithmetic on parameters; `source` is its text, `level` how tightly the text binds."""

    source: str
    level: int


class Int(int):
    """An int parameter, or arithmetic on parameters."""

    source: str
    level: int


def number(value: Any, source: str, level: int = ATOM) -> Any:
    """`value` with its text; anything but an int or a float (a bool, a string) is returned as it is."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    made = Float(value) if isinstance(value, float) else Int(value)
    made.source, made.level = source, level
    return made


def plain(value: Any) -> Any:
    """The number without its text, as a plan keeps it."""
    if isinstance(value, Float):
        return float(value)
    return int(value) if isinstance(value, Int) else value


def level_of(value: Any) -> int:
    """How tightly the text of a number binds: a negative literal is a unary expression."""
    if isinstance(value, Float | Int):
        return value.level
    return UNARY if isinstance(value, int | float) and value < 0 else ATOM


def written(value: Any) -> str:
    """The text of a number: as the user computed it from parameters, or as a literal."""
    if isinstance(value, Float | Int):
        return value.source
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value)


def embrace(value: Any, level: int) -> str:
    """The text of a number as an operand of an operator that binds at `level`."""
    return f"({written(value)})" if level_of(value) < level else written(value)


def operand_levels(level: int) -> tuple[int, int]:
    """How tightly the operands of a binary operator must bind to stand without brackets: - and / group to the left."""
    return (ATOM, UNARY) if level == POWER else (level, level + 1)


def _binary(symbol: str, level: int, compute: Callable[[Any, Any], Any]) -> tuple[Callable, Callable]:
    """The method and its reflection."""

    def combine(left: Any, right: Any) -> Any:
        if not isinstance(left, int | float) or not isinstance(right, int | float):
            return NotImplemented
        left_level, right_level = operand_levels(level)
        text = f"{embrace(left, left_level)} {symbol} {embrace(right, right_level)}"
        return number(compute(plain(left), plain(right)), text, level)

    return combine, lambda self, other: combine(other, self)


def _negate(self: Any) -> Any:
    return number(-plain(self), f"-{embrace(self, UNARY)}", UNARY)


_OPERATORS = (
    ("add", "+", SUM, operator.add),
    ("sub", "-", SUM, operator.sub),
    ("mul", "*", PRODUCT, operator.mul),
    ("truediv", "/", PRODUCT, operator.truediv),
    ("floordiv", "//", PRODUCT, operator.floordiv),
    ("mod", "%", PRODUCT, operator.mod),
    ("pow", "**", POWER, operator.pow),
)

for _class in (Float, Int):
    for _name, _symbol, _level, _compute in _OPERATORS:
        _method, _reflected = _binary(_symbol, _level, _compute)
        setattr(_class, f"__{_name}__", _method)
        setattr(_class, f"__r{_name}__", _reflected)
    _class.__neg__ = _negate
