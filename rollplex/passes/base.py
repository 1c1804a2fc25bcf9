"""What a pass is: a name, the facts it reads, the fact it makes, and a function from module to module."""

from __future__ import annotations

from typing import ClassVar, Protocol

from rollplex.ir.module import Module


class Pass(Protocol):
    """One rewrite or analysis; its fields are its options, the first sentence of its docstring what it does."""

    name: ClassVar[str]
    """What `--passes` and `--print-after` call it."""
    needs: ClassVar[tuple[type, ...]]
    """The facts that it reads: whoever makes them must run before."""
    makes: ClassVar[type]
    """The fact that it puts into the module."""

    def run(self, module: Module) -> Module:
        """A new module; the one given is not changed."""
        ...
