"""The checker: replays a plan without trusting the passes that made it, and refuses what cannot be run safely.

    violations = check_plan(plan)        all of them, () for a good plan
    verify_plan(plan)                    PlanError with all of them

It reads programs and summary, knows no pass and no solver, and comes to its own conclusions; `check/` has one idea a
file, `check/rules.py` the table of rules. The source is design.md section 4.
"""

from __future__ import annotations

from rollplex.ir.check.asked import check_asked
from rollplex.ir.check.capacity import Cuts, check_capacity
from rollplex.ir.check.facts import Facts
from rollplex.ir.check.form import check_names, check_shape
from rollplex.ir.check.graph import check_graph
from rollplex.ir.check.host_pool import check_host_pool
from rollplex.ir.check.imports import check_imports
from rollplex.ir.check.layout import check_layout
from rollplex.ir.check.loss import check_loss
from rollplex.ir.check.node import check_node
from rollplex.ir.check.numbers import check_numbers
from rollplex.ir.check.order import execute
from rollplex.ir.check.pools import check_pools
from rollplex.ir.check.publication import check_publication
from rollplex.ir.check.races import check_races
from rollplex.ir.check.release import check_handed_out
from rollplex.ir.check.residency import check_residency, replay
from rollplex.ir.check.rounds import check_rounds
from rollplex.ir.check.rules import RULES, Rule, Violation
from rollplex.ir.check.summary import Places, check_summary
from rollplex.ir.check.tail import check_tail
from rollplex.ir.check.tasks import check_tasks
from rollplex.ir.check.turns import check_turns
from rollplex.ir.check.update import check_update
from rollplex.ir.check.values import check_values
from rollplex.ir.check.work import check_work
from rollplex.ir.errors import PlanError
from rollplex.ir.plan import Plan

__all__ = ["RULES", "Rule", "Violation", "check_plan", "verify_plan"]


def check_plan(plan: Plan) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan.

    A plan with wrong names is judged by those alone, a plan whose programs never end not by their order in time.
    An infeasible plan is held to everything but capacity.
    """
    facts = Facts(plan)
    if wrong := check_names(facts):
        return wrong
    order, stuck = execute(facts)
    replays = replay(facts)
    found = [
        *check_shape(facts),
        *check_asked(facts),
        *check_graph(facts),
        *check_loss(facts),
        *check_numbers(facts),
        *check_node(facts),
        *check_pools(facts),
        *stuck,
        *check_residency(replays),
        *check_tasks(facts),
        *check_work(facts),
        *check_tail(facts),
        *check_rounds(facts),
        *check_turns(facts),
        *check_update(facts),
        *check_publication(facts),
        *check_layout(facts),
    ]
    if any(v.kind == "deadlock" for v in stuck):
        return tuple(found)
    cuts, held = Cuts(facts, order), {process: one.spans for process, one in replays.items()}
    found += [*check_values(facts, order), *check_imports(facts, order), *check_handed_out(facts, order)]
    found += check_races(facts, order, cuts, held)
    if plan.feasible:
        found += check_capacity(facts, cuts, tuple(held.values()))
    found += check_host_pool(facts, cuts, tuple(held.values()))
    return (*found, *check_summary(facts, Places.of(cuts, tuple(held.values()))))


def verify_plan(plan: Plan) -> None:
    """Raise PlanError with every violation, or return."""
    if found := check_plan(plan):
        raise PlanError(*(v.problem for v in found))
