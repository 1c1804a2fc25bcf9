"""What other packages add, by entry points: passes, algorithms, backends; found by name, loaded when asked for.

    [project.entry-points."rollplex.passes"]
    shared-tokens = "rollplex_example.shared_tokens:SharedTokens"

installed("rollplex.passes")["shared-tokens"].load()     the class
ROLLPLEX_DISABLE=rollplex-example                        as if that distribution added nothing; `all`: none does
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from rollplex.ir.errors import PluginError, Problem, RollplexError

Group = Literal["rollplex.passes", "rollplex.algorithms", "rollplex.backends"]
GROUPS: tuple[Group, ...] = ("rollplex.passes", "rollplex.algorithms", "rollplex.backends")
DISABLE = "ROLLPLEX_DISABLE"


@dataclass(frozen=True)
class Plugin:
    """One entry point: its name in its group, and the distribution that declares it."""

    group: str
    name: str
    distribution: str
    version: str
    entry: EntryPoint = field(repr=False)

    @property
    def where(self) -> str:
        """How errors name it: the distribution first, which is what a user can uninstall."""
        return f"{self.distribution} {self.version}, entry point {self.group}: {self.name} = {self.entry.value}"

    def load(self) -> Any:
        """The object it points at; PluginError, never a traceback, whatever its module raises."""
        try:
            return self.entry.load()
        except RollplexError as error:  # an algorithm's file is refused by its own decorator
            raise self.refusal(str(error)) from error
        except (Exception, SystemExit) as error:
            raise self.refusal(f"cannot be loaded: {type(error).__name__}: {error}") from error

    def refusal(self, what: str, hint: str = "") -> PluginError:
        """An error about this entry point; the last thing to try is always to leave its distribution out."""
        without = f"or go without it: {DISABLE}={self.distribution}"
        return PluginError(what, where=self.where, hint=f"{hint}, {without}" if hint else f"correct it, {without}")


def installed(group: Group) -> dict[str, Plugin]:
    """Every entry point of a group by name, in the order of names; PluginError when two share a name."""
    found: dict[str, Plugin] = {}
    clashes: list[Problem] = []
    for plugin in declared(group):
        if disabled(plugin):
            continue
        if plugin.name in found:
            what = f"{found[plugin.name].distribution} has a `{plugin.name}` too"
            clashes += plugin.refusal(what, "rename one").problems
        found[plugin.name] = plugin
    if clashes:
        raise PluginError(*clashes)
    return found


def disabled(plugin: Plugin) -> bool:
    """Whether the user switched its distribution off."""
    switched_off = {_normal(name) for name in os.environ.get(DISABLE, "").split(",")}
    return "all" in switched_off or _normal(plugin.distribution) in switched_off


def _normal(name: str) -> str:
    """A distribution's name as PyPI compares it: `My_Pkg` is `my-pkg`."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


@cache
def declared(group: Group) -> tuple[Plugin, ...]:
    """Every entry point of a group, switched off or not; reading all installed metadata takes a while: once only."""
    found = (Plugin(group, e.name, *_distribution(e), e) for e in entry_points(group=group))
    return tuple(sorted(found, key=lambda p: (p.name, p.distribution)))


def _distribution(entry: EntryPoint) -> tuple[str, str]:
    return (entry.dist.name, entry.dist.version) if entry.dist else ("an unnamed distribution", "")
