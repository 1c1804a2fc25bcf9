"""Whether an installed vLLM has what the backend uses of it, read from its source: nothing of vLLM is imported.

vllm 0.33.0 has no vllm.v1.worker.gpu_model_runner.GPUModelRunner.kv_caches, which engine vllm uses
vllm 0.33.0 has vllm.engine.arg_utils.EngineArgs without block_size, which engine vllm uses

A name is looked for where Python would find it: in its module, in what that imports, in the class and its bases, among
what methods set on `self`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from rollplex.backends.vllm.calls import Call


@dataclass(frozen=True)
class Found:
    """A definition, and the module that it stands in."""

    module: str
    node: ast.AST


class Surface:
    """The source below `root`, the directory that has `vllm/`."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def lacks(self, calls: Iterable[Call]) -> Iterator[str]:
        """What is not there as it is used, a sentence each."""
        for call in calls:
            found = self._dotted(call.module, call.name)
            if found is None:
                yield f"no {call}"
            elif odd := [name for name in call.takes if name not in self._takes(found)]:
                yield f"{call} without {', '.join(odd)}"

    def _dotted(self, module: str, name: str) -> Found | None:
        owner, _, leaf = name.partition(".")
        found = self._top(module, owner)
        return self._member(found, leaf) if found and leaf else found

    def _top(self, module: str, name: str) -> Found | None:
        """A name of a module, or of the one that it is imported from."""
        for node in _statements(self._tree(module)):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._top(self._source(module, node), alias.name)
            elif name in _names(node):
                return Found(module, node)
        return None

    def _member(self, owner: Found, name: str) -> Found | None:
        """An attribute of a class, of one of its bases, or of the class that a name has an instance of."""
        if not isinstance(owner.node, ast.ClassDef):
            of = self._top(owner.module, _made_by(owner.node))
            return self._member(of, name) if of else None
        for node in owner.node.body:
            if name in _names(node) or name in _set_on_self(node):
                return Found(owner.module, node)
        bases = (self._top(owner.module, base) for base in _bases(owner.node))
        return next((at for base in bases if base and (at := self._member(base, name))), None)

    def _takes(self, found: Found) -> set[str]:
        """Parameters by name: of a function, or of the constructor of a class."""
        if isinstance(found.node, ast.FunctionDef):
            return _parameters(found.node)
        if not isinstance(found.node, ast.ClassDef):
            return set()
        made = self._member(found, "__init__")
        if made is not None and isinstance(made.node, ast.FunctionDef):
            return _parameters(made.node)
        bases = (self._top(found.module, base) for base in _bases(found.node))
        inherited = (self._takes(base) for base in bases if base)
        own = {name for node in found.node.body if isinstance(node, ast.AnnAssign) for name in _names(node)}
        return own.union(*inherited)

    def _tree(self, module: str) -> ast.Module:
        path = self._root.joinpath(*module.split("."))
        return _parsed(path / "__init__.py" if path.is_dir() else path.with_suffix(".py"))

    def _source(self, module: str, node: ast.ImportFrom) -> str:
        """The module that `from .x import y` names."""
        if not node.level:
            return node.module or ""
        here = module.split(".")
        inside = here if self._root.joinpath(*here).is_dir() else here[:-1]
        package = inside[: len(inside) - node.level + 1]
        return ".".join([*package, *([node.module] if node.module else [])])


def installed_source() -> Path | None:
    """The directory that `import vllm` would import from; None where there is none."""
    spec = find_spec("vllm")
    places = list(spec.submodule_search_locations or ()) if spec else []
    return Path(places[0]).parent if places else None


@cache
def _parsed(path: Path) -> ast.Module:
    """Empty where there is no such file."""
    return ast.parse(path.read_text("utf-8")) if path.is_file() else ast.Module([], [])


def _statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Those of a module, also under `if` and `try`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If | ast.Try):
            yield from _statements(node)
        elif isinstance(node, ast.stmt):
            yield node


def _names(node: ast.AST) -> set[str]:
    """What a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def _set_on_self(node: ast.AST) -> set[str]:
    """What a method assigns to its `self`."""
    if not isinstance(node, ast.FunctionDef):
        return set()
    stored = (n for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store))
    return {n.attr for n in stored if isinstance(n.value, ast.Name) and n.value.id == "self"}


def _bases(node: ast.ClassDef) -> list[str]:
    """Names of bases, also of those with parameters: `Base[X]`."""
    plain = (base.value if isinstance(base, ast.Subscript) else base for base in node.bases)
    return [base.id for base in plain if isinstance(base, ast.Name)]


def _made_by(node: ast.AST) -> str:
    """The class whose constructor an assignment calls; empty where it does not."""
    made = getattr(node, "value", None)
    return made.func.id if isinstance(made, ast.Call) and isinstance(made.func, ast.Name) else ""


def _parameters(node: ast.FunctionDef) -> set[str]:
    arguments = node.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
