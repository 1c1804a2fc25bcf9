"""What a plan's job says of its roles, read off the plan before anybody knows whether that is a job at all.

said(plan, "prefix_saved")     {"actor": "group", "reference": "auto"}
"""

from __future__ import annotations

from typing import Any

from rollplex.ir.plan import Plan


def said(plan: Plan, key: str) -> dict[str, Any]:
    """The values under a key of the roles' sections, by role; None where a section does not have it."""
    match plan.job:
        case {"roles": dict() as roles}:
            return {name: role.get(key) for name, role in roles.items() if isinstance(role, dict)}
        case _:
            return {}
