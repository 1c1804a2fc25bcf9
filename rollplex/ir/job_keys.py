"""From pydantic's errors to messages about keys of the job file: which key, what is wrong, what would be right."""

from __future__ import annotations

import difflib
import types
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from rollplex.ir.job_engines import DEGREES

KeyPath = tuple[str | int, ...]

# Values that later versions accept: say so instead of calling them a typing mistake.
_LATER = {"streamed", "reindex"}

_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "a text",
    "model": "a section with keys",
    "dict": "a section with keys",
    "tuple": "a list",
    "finite": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "more than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def locate(root: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[KeyPath, type[BaseModel] | None]:
    """The part of a pydantic location that names keys, and the section that the last key stands in (if any)."""
    path: list[int | str] = []
    current: Any = root
    parent: type[BaseModel] | None = None
    for part in loc:
        section, values = _section(current), _dict_values(current)
        if section is None and values is None:
            break  # inside a leaf: union branches, positions in a list
        path.append(part)
        parent = section
        if section is None:
            current = values
        elif part in section.model_fields:
            current = section.model_fields[str(part)].annotation
        else:
            break
    return tuple(path), parent


def _section(annotation: Any) -> type[BaseModel] | None:
    for option in _options(annotation):
        if isinstance(option, type) and issubclass(option, BaseModel):
            return option
    return None


def _dict_values(annotation: Any) -> Any:
    for option in _options(annotation):
        if get_origin(option) is dict:
            return get_args(option)[1]
    return None


def _options(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def explain(error: ErrorDetails, path: KeyPath, parent: type[BaseModel] | None) -> tuple[str, str]:
    """What is wrong with the key, and what to try."""
    key, kind, value, context = path[-1] if path else "job", error["type"], _short(error["input"]), error.get("ctx", {})
    if kind == "extra_forbidden":
        keys = list(parent.model_fields) if parent else []
        return f"unknown key `{key}`", nearest(str(key), keys) or "keys here: " + ", ".join(keys)
    if kind == "missing":
        return _missing(error, path, parent)
    if kind == "literal_error":
        return _not_among(str(key), str(error["input"]), context["expected"])
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return f"`{key}` is {value}; must be {words} {context[bound]:g}", ""
    if kind in ("too_short", "string_too_short"):
        return f"`{key}` is empty", ""
    if kind == "value_error":
        return f"`{key}`: {context['error']}", ""
    expected = _EXPECTED.get(kind.split("_")[0])
    expected = f"{expected}, or auto" if expected and key in DEGREES else expected
    return f"`{key}` is {value}; " + (f"expected {expected}" if expected else error["msg"].lower()), ""


def _missing(error: ErrorDetails, path: KeyPath, parent: type[BaseModel] | None) -> tuple[str, str]:
    key = str(path[-1])
    if len(error["loc"]) > len(path):
        return f"`{key}` has too few values: {_short(error['input'])}", ""
    assert parent is not None
    return f"`{key}` is missing", parent.model_fields[key].description or ""


def _not_among(key: str, value: str, expected: str) -> tuple[str, str]:
    options = expected.replace("'", "").replace(" or ", ", ")
    later = "comes later; expected" if value in _LATER else "is not known; expected"
    return f"`{key}`: `{value}` {later} one of {options}", nearest(value, options.split(", "))


def _short(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def nearest(word: str, options: list[str]) -> str:
    """The option that the word was probably meant to be, or nothing."""
    return next(iter(difflib.get_close_matches(word, options, n=1, cutoff=0.6)), "")
