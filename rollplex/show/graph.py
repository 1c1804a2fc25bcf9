"""The split graph by phase: one line a value, `attached` or `detached` on boundaries, the user's line at the right.

P1  %kv_act = prefix(actor, %prompts)                                      attached                    :16
"""

from __future__ import annotations

import textwrap

from rich.text import Text

from rollplex.ir.plan import NodeRecord, Plan
from rollplex.show.expressions import Records
from rollplex.show.text import WIDTH, clip, line

_NOTE, _WHERE = 10, 7  # columns at the right: attached | :16
_NAME = 24  # longest name that the others are aligned to


def graph_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """The graph section of a plan page."""
    records = Records(plan.graph)
    statements = sorted(records.statements(), key=lambda r: r.phase)
    file = plan.algorithm.partition(":")[0]
    title = "graph, split at the first response position"
    room = width - len(title) - 2
    lines = [line((title, "bold"), f"{clip(file, room):>{room + 2}}")]
    names = min(max((len(_name(r)) for r in statements), default=0), _NAME)
    for record in statements:
        lines += _statement(records, record, _note(plan, record), names, width)
    return lines


def _name(record: NodeRecord) -> str:
    return "" if record.op == "rx.update" else f"%{record.name}"


def _note(plan: Plan, record: NodeRecord) -> str:
    """Whether a boundary is attached to autograd."""
    if record.op != "rx.prefix":
        return ""
    attached = any(o.attached for o in plan.summary.objects if o.class_ == "boundary" and o.role == record.args[0])
    return "attached" if attached else "detached"


def _statement(records: Records, record: NodeRecord, note: str, names: int, width: int) -> list[Text]:
    name = _name(record)
    head = f"  {record.phase:<2}  {name:<{names}} {'=' if name else ' '} "
    indent = min(len(head), width // 2)
    room = width - indent - (_NOTE if note else 0) - _WHERE
    first, *rest = textwrap.wrap(records.text(record), room, break_on_hyphens=False) or [""]
    where = f":{record.loc.rpartition(':')[2]}" if record.loc else ""
    left = f"{clip(head, indent)}{first}"
    tail = f"{note:<{_NOTE}}" if note else ""
    gap = " " * (width - len(left) - len(tail) - max(len(where), _WHERE))
    return [line(left, gap, (tail, "dim"), (f"{where:>{_WHERE}}", "dim")), *(line(" " * indent + r) for r in rest)]
