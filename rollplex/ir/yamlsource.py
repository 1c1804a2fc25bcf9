"""A YAML file as plain data plus the line of every key.

source = read_yaml(Path("job.yaml"));  source.line(("workload", "prompts")) == 17
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from rollplex.ir.errors import JobError, Problem
from rollplex.ir.textfile import read_text

KeyPath = tuple[str | int, ...]


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-6` as a text for want of a dot; here it is the number that everyone means."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+[eE][-+]?[0-9]+"), list("-+0123456789")
)


@dataclass(frozen=True)
class YamlSource:
    """What a file says, and where."""

    file: str
    data: Any
    lines: dict[KeyPath, int] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()

    def line(self, path: KeyPath) -> int:
        """The line of the key, or of the deepest section on the way to it that exists."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 1)

    def where(self, path: KeyPath) -> str:
        """`job.yaml:17`, the form errors use."""
        return f"{self.file}:{self.line(path)}"


def parse_value(text: str) -> Any:
    """A value of an override, read as YAML; ValueError when it is not one."""
    try:
        return _Reader("").build(yaml.compose(text, Loader=_Loader), ())
    except (yaml.YAMLError, JobError, RecursionError, ValueError) as error:
        raise ValueError(f"`{text}` is not a YAML value") from error


def read_yaml(path: Path) -> YamlSource:
    """The file's data; JobError for a file that cannot be read or is not YAML."""
    text = _read_text(path)
    try:
        node = yaml.compose(text, Loader=_Loader)
        reader = _Reader(path.name)
        data = reader.build(node, ())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        spot = f"{path.name}:{mark.line + 1}:{mark.column + 1}" if mark else path.name
        raise JobError(f"not YAML: {error.problem or error.context}", where=spot) from None
    except yaml.YAMLError as error:
        raise JobError(f"not YAML: {' '.join(str(error).split())}", where=path.name) from None
    except RecursionError:
        raise JobError("nested too deeply", where=path.name) from None
    return YamlSource(path.name, data, reader.lines, tuple(reader.problems))


def _read_text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError:
        raise JobError(f"no such file: {path}", hint="examples/jobs/ has job files to start from") from None
    except IsADirectoryError:
        raise JobError(f"{path} is a directory; expected a YAML file") from None
    except UnicodeDecodeError:
        raise JobError("not a text file (UTF-8)", where=path, hint="pass a YAML file") from None
    except (OSError, ValueError) as error:
        raise JobError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


class _Reader:
    """Turns YAML nodes into plain data, noting the line of each key; refuses aliases and repeated keys."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.lines: dict[KeyPath, int] = {}
        self.problems: list[Problem] = []
        self._seen: set[int] = set()
        self._scalars = _Loader("")

    def build(self, node: yaml.Node | None, path: KeyPath) -> Any:
        if node is None:
            return None
        self._refuse_alias(node)
        self.lines.setdefault(path, node.start_mark.line + 1)
        kind = node.tag.removeprefix("tag:yaml.org,2002:")
        if isinstance(node, yaml.MappingNode) and kind == "map":
            return dict(self._items(node, path))
        if isinstance(node, yaml.SequenceNode) and kind == "seq":
            return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]
        return self._scalar(node, kind)

    def _scalar(self, node: yaml.Node, kind: str) -> Any:
        if kind == "timestamp":
            return node.value  # a date is a text here
        if not isinstance(node, yaml.ScalarNode) or kind not in ("null", "bool", "int", "float", "str"):
            raise yaml.constructor.ConstructorError(None, None, f"the tag {node.tag} is not read here", node.start_mark)
        try:
            return self._scalars.construct_object(node)
        except (ValueError, LookupError):  # a tag that the text does not fit, a number beyond all bounds
            what = f"{node.value[:40]!r} is not of type {kind}"
            raise yaml.constructor.ConstructorError(None, None, what, node.start_mark) from None

    def _items(self, node: yaml.MappingNode, path: KeyPath) -> Iterator[tuple[str, Any]]:
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "(not a name)"
            here, line = (*path, key), key_node.start_mark.line + 1
            if here in self.lines:
                where = f"{self.file}:{line}"
                self.problems.append(Problem(f"key `{key}` stands there twice (line {self.lines[here]} too)", where))
            self.lines[here] = line
            yield key, self.build(value_node, here)

    def _refuse_alias(self, node: yaml.Node) -> None:
        # Composing gives an aliased node twice; expanding them could take for ever, and a job has no use for them.
        if id(node) in self._seen:
            raise yaml.constructor.ConstructorError(None, None, "aliases (*name) are not read here", node.start_mark)
        self._seen.add(id(node))
