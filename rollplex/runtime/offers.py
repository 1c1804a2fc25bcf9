"""What rows and responses offer to the user's host functions, which take of it what they want, by name.

reward(answer, response)      row, tokens, index, turn, history and the rest are not even made for it
difficulty(question)          before the rollout there is no response to offer
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from rollplex.backends.data.rows import Row
from rollplex.ir.errors import RunError

OFFERS = ("question", "answer", "response", "row", "tokens", "index", "turn", "history")
EARLY_OFFERS = ("question", "answer", "row", "index")


def asked(row: Row) -> dict[str, Any]:
    """What a row offers to a host function, whether or not there is a response."""
    return {"question": row.question, "answer": row.answer, "row": row_data(row)}


def row_data(row: Row) -> dict[str, Any]:
    """A row as the user wrote it, with its place (`id`) and media paths that can be opened."""
    media = {kind: str(path) for kind, path in (("video", row.video), ("image", row.image)) if path is not None}
    return {**row.extra, **media, "question": row.question, "answer": row.answer, "id": row.id}


def parameters_of(function: Callable[..., Any], name: str, offers: Sequence[str] = OFFERS) -> frozenset[str]:
    """Which of `offers` a host function takes; RunError for a parameter without default that nobody offers."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        what = f"`{name}` is {function!r}, not a Python function"
        raise RunError(what, where="host function", hint="pass a function defined with def") from None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return frozenset(offers)
    unknown = [p.name for p in parameters if p.name not in offers and p.default is p.empty]
    if unknown:
        late = [p for p in unknown if p in OFFERS]
        why = "there is no response when it runs" if late else "which no row offers"
        what, may = f"`{name}` takes {', '.join(late or unknown)}, {why}", ", ".join(offers)
        raise RunError(what, where="host function", hint=f"a host function may take {may}, by name")
    return frozenset(p.name for p in parameters)
