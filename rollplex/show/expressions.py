"""Records of a plan's graph as expressions: temporaries that only their own line reads stand where they are read.

%ratio = torch.exp(%logp - %rollout.logprobs)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollplex.ir.params import ATOM, BINARY_SYMBOLS, COMPARE, OR, UNARY, UNARY_SYMBOLS, operand_levels
from rollplex.ir.plan import NodeRecord, references

_CALLS = frozenset({"rx.generate", "rx.prefix", "rx.suffix", "rx.logprobs", "rx.host", "rx.update"})

Expression = tuple[str, int]
"""A text and how tightly it binds."""


class Records:
    """The graph of a plan, ready to be printed."""

    def __init__(self, records: Sequence[NodeRecord]) -> None:
        self.by_name = {r.name: r for r in records}
        self._users: dict[str, list[NodeRecord]] = {}
        for record in records:
            for name in references((record.args, record.kwargs)):
                self._users.setdefault(name, []).append(record)

    def statements(self) -> list[NodeRecord]:
        """The records that get a line of their own, in the graph's order."""
        return [r for r in self.by_name.values() if self._is_statement(r)]

    def text(self, record: NodeRecord) -> str:
        """What stands right of a statement's `=`."""
        return self._expression(record)[0]

    def _is_statement(self, record: NodeRecord) -> bool:
        if record.op in ("input", "rx.field") or self._is_broadcast(record):
            return False
        readers = self._readers(record)
        return record.op in _CALLS or len(readers) != 1 or readers[0].loc != record.loc

    def _readers(self, record: NodeRecord) -> list[NodeRecord]:
        """Who reads a value, a broadcast of it not counting as a reader of its own."""
        found = []
        for user in self._users.get(record.name, ()):
            found += self._readers(user) if self._is_broadcast(user) else [user]
        return found

    def _is_broadcast(self, record: NodeRecord) -> bool:
        """Whether infer-types put it in, to align named dims: `advantage_wide`."""
        return record.op == "torch.unsqueeze" and f"{_first_reference(record)}_wide" in record.name

    # ---- expressions

    def _operand(self, value: Any, level: int = 0) -> str:
        text, binds = self._value(value)
        return f"({text})" if binds < level else text

    def _value(self, value: Any) -> Expression:
        match value:
            case {"ref": str(name)} if name in self.by_name:
                record = self.by_name[name]
                if self._is_broadcast(record):
                    return self._value(record.args[0])
                inline = record.op != "input" and not self._is_statement(record)
                return self._expression(record) if inline else (f"%{name}", ATOM)
            case {"dtype": str(name)}:
                return f"torch.{name}", ATOM
            case {"float": str(number)}:
                return f'float("{number}")', ATOM
            case {"ellipsis": _}:
                return "...", ATOM
            case {"slice": [start, stop, step]}:
                bounds = ["" if v is None else self._operand(v) for v in (start, stop)]
                return ":".join(bounds if step is None else [*bounds, self._operand(step)]), ATOM
            case list() | tuple():
                inner = ", ".join(self._operand(v) for v in value)
                return f"({inner},)" if len(value) == 1 else f"({inner})", ATOM
            case int() | float() if value < 0:
                return repr(value), UNARY
            case _:
                return repr(value), ATOM

    def _expression(self, record: NodeRecord) -> Expression:
        kind, _, name = record.op.partition(".")
        if kind == "operator":
            return self._operator(name, record)
        if record.op == "rx.field":
            return f"{self._operand(record.args[0], ATOM)}.{record.args[1]}", ATOM
        if kind == "Tensor":
            receiver = self._operand(record.args[0], ATOM)
            return f"{receiver}.{name}({self._arguments(record.args[1:], record.kwargs)})", ATOM
        if record.op in _CALLS:
            return f"{name}({self._call_arguments(record)})", ATOM
        return f"{name if kind == 'rx' else record.op}({self._arguments(record.args, record.kwargs)})", ATOM

    def _call_arguments(self, record: NodeRecord) -> str:
        """A model or host call: the role or function stands first, as a bare name."""
        kwargs = {k: v for k, v in record.kwargs.items() if (k, v) != ("returns", "scores")}
        return ", ".join(x for x in (str(record.args[0]), self._arguments(record.args[1:], kwargs)) if x)

    def _arguments(self, args: Iterable[Any], kwargs: Mapping[str, Any]) -> str:
        shown = [self._operand(a) for a in args]
        return ", ".join([*shown, *(f"{k}={self._operand(v)}" for k, v in kwargs.items())])

    def _operator(self, name: str, record: NodeRecord) -> Expression:
        if name == "getitem":
            index = record.args[1]
            inner = (
                ", ".join(self._operand(i) for i in index) if isinstance(index, list | tuple) else self._operand(index)
            )
            return f"{self._operand(record.args[0], ATOM)}[{inner}]", ATOM
        if name in UNARY_SYMBOLS:
            return UNARY_SYMBOLS[name] + self._operand(record.args[0], UNARY), UNARY
        if name not in BINARY_SYMBOLS:
            return f"{name}({self._arguments(record.args, record.kwargs)})", ATOM
        symbol, level = BINARY_SYMBOLS[name]
        left, right = (OR, OR) if level == COMPARE else operand_levels(level)
        return f"{self._operand(record.args[0], left)} {symbol} {self._operand(record.args[1], right)}", level

    def _index(self, index: Any) -> str:
        return ", ".join(self._operand(i) for i in (index if isinstance(index, list | tuple) else (index,)))


def _first_reference(record: NodeRecord) -> str:
    return next(iter(references(record.args)), "")
