"""Passes of other packages: entry points of the group `rollplex.passes`, each put after the pass that it names.

    class SharedTokens:
        name, after = "shared-tokens", "share-prefix"
        makes, needs = Shared, (SharedPrefixes,)
        def run(self, module): ..

    .. share-prefix  shared-tokens  schedule ..

Several after the same pass run in the order of their names. What one of them does wrong is told as its package's
mistake, never as ours.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from rollplex.ir import graph as g
from rollplex.ir.errors import PluginError, Problem, RollplexError
from rollplex.ir.module import Module
from rollplex.ir.plugins import Plugin, installed
from rollplex.passes.base import Pass


@dataclass(frozen=True)
class InstalledPass:
    """A pass with the package it came from: its result is checked, its failures carry the package's name."""

    inner: Any
    plugin: Plugin

    @property
    def name(self) -> str:
        """The pass's own name, which is its entry point's too."""
        return self.inner.name

    @property
    def makes(self) -> type:
        """The fact it makes."""
        return self.inner.makes

    @property
    def needs(self) -> tuple[type, ...]:
        """The facts it reads, as far as it says so."""
        return tuple(getattr(self.inner, "needs", ()))

    @property
    def after(self) -> str:
        """The pass it stands behind."""
        return self.inner.after

    def run(self, module: Module) -> Module:
        """Run it; PluginError for an exception, for a result without its fact, and for a graph that is none."""
        try:
            done = self.inner.run(module)
        except RollplexError:
            raise
        except Exception as error:  # whatever somebody else's code raises is theirs to correct
            raise self.plugin.refusal(f"failed: {type(error).__name__}: {error}") from error
        if not isinstance(done, Module) or self.makes not in done:
            raise self.plugin.refusal(f"its run gave no module with the fact {self.makes.__name__}")
        self._verify(done)
        return done

    def _verify(self, module: Module) -> None:
        try:
            g.verify(module.graph)
        except (RollplexError, RuntimeError) as error:  # fx's own lint raises RuntimeError
            raise self.plugin.refusal(f"left a graph that is none: {error}") from error


def installed_passes() -> tuple[InstalledPass, ...]:
    """Every pass of an installed package; PluginError with all that are of no use."""
    found: list[InstalledPass] = []
    problems: list[Problem] = []
    for plugin in installed("rollplex.passes").values():
        try:
            found.append(_loaded(plugin))
        except PluginError as error:
            problems += error.problems
    if problems:
        raise PluginError(*problems)
    return tuple(found)


def _loaded(plugin: Plugin) -> InstalledPass:
    """The pass an entry point leads to: an instance, or a class whose options all have defaults."""
    value = plugin.load()
    if isinstance(value, type):
        try:
            value = value()
        except TypeError as error:
            raise plugin.refusal(f"cannot be made without options: {error}", "name an instance instead") from error
    lacks = [f"`{key}`, {meaning}" for key, meaning in _SHAPE.items() if not _has(value, key)]
    if lacks:
        raise plugin.refusal(f"{type(value).__name__} is no pass, it lacks {'; '.join(lacks)}")
    if value.name != plugin.name:
        raise plugin.refusal(f"its pass is named `{value.name}`", "give the entry point and the pass one name")
    return InstalledPass(value, plugin)


_SHAPE = {
    "name": "its name as a text",
    "after": "the name of the pass it stands behind",
    "makes": "the class of the fact it makes",
    "run": "a method from module to module",
}


def _has(value: object, key: str) -> bool:
    held = getattr(value, key, None)
    if key == "run":
        return callable(held)
    return isinstance(held, type) if key == "makes" else isinstance(held, str)


def insert(pipeline: Sequence[Pass], extra: Iterable[InstalledPass]) -> tuple[Pass, ...]:
    """The pipeline with every extra pass behind the one it names, which may be another extra pass."""
    line: list[Pass] = list(pipeline)
    waiting = sorted(extra, key=lambda p: p.name, reverse=True)  # each goes directly behind: the first name comes last
    _refuse_doubles(line, waiting)
    while waiting:
        ready = [p for p in waiting if any(q.name == p.after for q in line)]
        if not ready:
            raise PluginError(*(problem for p in waiting for problem in _nowhere(p, line).problems))
        for p in ready:
            behind = next(i for i, q in enumerate(line) if q.name == p.after) + 1
            line.insert(behind, cast(Pass, p))  # its name belongs to the instance, those of ours to their classes
        waiting = [p for p in waiting if p not in ready]
    return tuple(line)


def _nowhere(p: InstalledPass, line: Sequence[Pass]) -> PluginError:
    names = ", ".join(q.name for q in line)
    return p.plugin.refusal(f"stands after `{p.after}`, and no such pass runs", f"after one of {names}")


def _refuse_doubles(line: Sequence[Pass], extra: Iterable[InstalledPass]) -> None:
    """Names and facts are the pipeline's keys: a second pass of a name, or maker of a fact, is refused."""
    names, makers = {p.name for p in line}, {p.makes: p.name for p in line}
    for p in extra:
        if p.name in names:
            raise p.plugin.refusal(f"a pass named `{p.name}` is built in", "rename it")
        if p.makes in makers:
            what = f"`{makers[p.makes]}` makes the fact {p.makes.__name__} already"
            raise p.plugin.refusal(what, "give it a fact of its own")
        names.add(p.name)
        makers[p.makes] = p.name
