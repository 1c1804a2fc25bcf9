"""Load an algorithm from a file: the only one, or the one that is named; mistakes are told without a traceback."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from rollplex.ir.dsl import Algorithm
from rollplex.ir.errors import GraphError, Loc, RollplexError
from rollplex.ir.plugins import installed
from rollplex.ir.tracing import closest


def find_algorithm(text: str) -> Algorithm:
    """What the command line calls an algorithm: FILE.py, FILE.py:NAME, or the NAME of one that a package has."""
    file, python, name = text.partition(".py:")
    if python or text.endswith(".py"):
        return load_algorithm(f"{file}.py" if python else text, name or None)
    plugins = installed("rollplex.algorithms")
    if text in plugins:
        found = plugins[text].load()
        if not isinstance(found, Algorithm):
            raise plugins[text].refusal(f"{found!r} is no algorithm", "put @rx.algorithm above the function")
        return found
    if Path(text).exists():
        return load_algorithm(text)
    hint = closest(text, plugins) if plugins else "FILE.py, or install the package that has it"
    raise GraphError(f"there is no file {text}, and no installed algorithm of this name", hint=hint)


def load_algorithm(path: str | Path, name: str | None = None) -> Algorithm:
    """The algorithm of a Python file. Raises RollplexError with the file's line for whatever is wrong with it."""
    file = Path(path)
    if not file.is_file():
        raise GraphError(f"there is no file {file}", hint="pass the Python file that has the @rx.algorithm function")
    if file.suffix != ".py":
        raise GraphError(
            "an algorithm is a Python file", where=file, hint="pass a .py file with an @rx.algorithm function"
        )
    found = _algorithms(_execute(file), file)
    if not found:
        raise GraphError("no @rx.algorithm function", where=file.name, hint="put @rx.algorithm above the function")
    if name is None and len(found) > 1:
        raise GraphError(f"{len(found)} algorithms: {', '.join(found)}", where=file.name, hint="name one of them")
    if name is not None and name not in found:
        raise GraphError(f"no algorithm `{name}`", where=file.name, hint=closest(name, found))
    return found[name] if name is not None else next(iter(found.values()))


def _algorithms(module: ModuleType, file: Path) -> dict[str, Algorithm]:
    """The algorithms a file defines; if it defines none, those it imports."""
    values = {a.name: a for a in vars(module).values() if isinstance(a, Algorithm)}
    own = {n: a for n, a in values.items() if Path(a.file).resolve() == file.resolve()}
    return own or values


class _Anew(SourceFileLoader):
    """Compiles a file each time: its date and size alone do not tell two texts of one second apart."""

    def path_stats(self, path: str) -> NoReturn:
        """Without them Python keeps nothing."""
        raise OSError


def _execute(file: Path) -> ModuleType:
    """Run a file as a module of its own, its folder importable meanwhile, as `python file.py` has it."""
    spec = importlib.util.spec_from_file_location(file.stem, file, loader=_Anew(file.stem, str(file)))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importable(file.resolve().parent), _registered(file.stem, module):
        try:
            spec.loader.exec_module(module)
        except RollplexError:
            raise
        except SyntaxError as err:
            where = Loc(Path(err.filename or file).name, err.lineno or 1)
            raise GraphError(f"not Python: {err.msg}", where=where, hint="correct the line") from None
        except UnicodeDecodeError:
            raise GraphError("the file is not text", where=file.name, hint="pass a Python file") from None
        except (Exception, SystemExit) as err:
            raise _failed(file, err) from err
    return module


def _failed(file: Path, err: BaseException) -> GraphError:
    frames = [f for f in traceback.extract_tb(err.__traceback__) if Path(f.filename).resolve() == file.resolve()]
    where = Loc(file.name, frames[-1].lineno or 1) if frames else file.name
    hint = "install it, or correct the name" if isinstance(err, ImportError) else "the file must be importable"
    return GraphError(f"{type(err).__name__}: {err}", where=where, hint=hint)


@contextlib.contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@contextlib.contextmanager
def _registered(name: str, module: ModuleType) -> Iterator[None]:
    """In sys.modules while it runs (dataclasses look there); a module that is there already is left in its place."""
    before = sys.modules.get(name)
    if before is None:
        sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            sys.modules.pop(name, None)
