"""Sizes as people write them (`29`, `"48 MiB"`, `"1.4 TB"`) and as we print them.

A number alone means the unit in the key's name. GiB are kept as floats: scaling by 2**30 is exact, so no byte is lost.
"""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS = (
    {"b": 1}
    | {f"{p}b": 1000**i for i, p in enumerate("kmgt", 1)}
    | {f"{p}ib": 1024**i for i, p in enumerate("kmgt", 1)}
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-zA-Z]+)\s*")


def parse_nbytes(text: str) -> int:
    """Bytes of a size with a unit; ValueError says what is accepted."""
    match = _SIZE.fullmatch(text)
    unit = match and _UNITS.get(match[2].lower())
    if not match or not unit:
        raise ValueError(f'{text!r} is not a size; write a number, or a size with a unit such as "48 MiB" or "1.4 TB"')
    return round(float(match[1]) * unit)


def _in_unit(nbytes_per_unit: int):
    def convert(value: object) -> object:
        if not isinstance(value, str):
            return value
        try:
            return float(value)
        except ValueError:
            return parse_nbytes(value) / nbytes_per_unit

    return convert


MOST_GIB, MOST_GB = 2**20, 2**30  # of one GPU, of one node; sizes beyond them are slips of the pen
Gib = Annotated[float, BeforeValidator(_in_unit(2**30)), Field(ge=0, le=MOST_GIB, allow_inf_nan=False)]
Gb = Annotated[float, BeforeValidator(_in_unit(10**9)), Field(ge=0, le=MOST_GB, allow_inf_nan=False)]


def gib_to_nbytes(gib: float) -> int:
    """Whole bytes of a size in GiB."""
    return round(gib * 2**30)


def gb_to_nbytes(gb: float) -> int:
    """Whole bytes of a size in decimal GB."""
    return round(gb * 10**9)


def pretty(nbytes: float) -> str:
    """`79.1 GiB`, `48.0 MiB`: three significant figures and the unit that fits."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if abs(nbytes) >= 1024**power:
            return f"{nbytes / 1024**power:.1f} {unit}"
    return f"{nbytes:.0f} B"
