"""Host functions that need no response: that of `weight = rx.host(difficulty)(prompts)` is called before decode."""

from __future__ import annotations

from rollplex.ir.plan import Plan, references


def early_hosts(plan: Plan) -> frozenset[str]:
    """The host functions behind which there is no response."""
    late: set[str] = set()
    for record in plan.graph:
        if record.op == "rx.generate" or late.intersection(references([record.args, record.kwargs])):
            late.add(record.name)
    return frozenset(name for name in plan.hosts if name not in late)
