"""Which passes of the pipeline run: what `--passes` says.

    layout,lifetimes      these, in this order
    ..residency           from the first to residency
    -shared-tokens        all but this one; may follow the other two forms: ..residency,-shared-tokens

A pass whose facts nobody makes before it is refused, with the pass that needs them and the one that would make them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from rollplex.ir.errors import PassError, Problem
from rollplex.passes.base import Pass

OPTION = "--passes"


def select(pipeline: Sequence[Pass], text: str) -> tuple[Pass, ...]:
    """The passes that a `--passes` text names; PassError has every name that is none."""
    terms = [t.strip() for t in text.split(",") if t.strip()]
    without = [t.removeprefix("-") for t in terms if t.startswith("-")]
    kept = [t for t in terms if not t.startswith("-")]
    known = {p.name: p for p in pipeline}
    check_names([*(t.removeprefix("..") for t in kept), *without], known, OPTION)
    chosen = _kept(pipeline, kept)
    left = tuple(p for p in chosen if p.name not in without)
    if not left:
        raise PassError("no pass is left", where=OPTION, hint="..NAME runs from the first to that one")
    return left


def _kept(pipeline: Sequence[Pass], terms: Sequence[str]) -> tuple[Pass, ...]:
    names = [p.name for p in pipeline]
    ranges = [t for t in terms if t.startswith("..")]
    if ranges and len(terms) > 1:
        what = f"`{ranges[0]}` says where the pipeline ends: nothing but what is left out may stand beside it"
        raise PassError(what, where=OPTION, hint=f"{ranges[0]},-NAME")
    if ranges:
        return tuple(pipeline[: names.index(ranges[0].removeprefix("..")) + 1])
    return tuple(pipeline[names.index(t)] for t in terms) if terms else tuple(pipeline)


def check_names(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """PassError for names that are no pass, each with the nearest one that is."""
    known = list(known)
    wrong = [
        Problem(f"no pass `{n}`", where, " or ".join(difflib.get_close_matches(n, known)) or ", ".join(known))
        for n in names
        if n not in known
    ]
    if wrong:
        raise PassError(*wrong)


def check_needs(passes: Sequence[Pass], makers: Sequence[Pass], plan: Sequence[type] = ()) -> None:
    """Every fact is made before it is needed, `plan` being what is needed at the end; PassError says who needs what."""
    made: set[type] = set()
    problems: list[Problem] = []
    for p in passes:
        problems += [_missing(f"`{p.name}`", fact, makers) for fact in p.needs if fact not in made]
        made.add(p.makes)
    problems += [_missing("the plan", fact, makers) for fact in plan if fact not in made]
    if problems:
        raise PassError(*problems)


def _missing(who: str, fact: type, makers: Sequence[Pass]) -> Problem:
    maker = next((p.name for p in makers if p.makes is fact), None) or getattr(fact, "made_by", "another pass")
    return Problem(f"{who} needs {fact.__name__}, which `{maker}` makes", OPTION, f"run `{maker}` before")
