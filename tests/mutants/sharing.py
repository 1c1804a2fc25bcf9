"""Faults of a table of sharing: what it rests on, what it covers, its seconds, and tables that are not the best."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.agree import with_job
from mutants.edit import mutant, summarise
from rollplex.ir.plan import Plan, SolverResult
from rollplex.ir.planned_sharing import PolicyRow


def with_policy(plan: Plan, **fields: Any) -> Plan:
    """The plan with other fields in its policy."""
    return summarise(plan, policy=plan.summary.policy.model_copy(update=fields))


def with_row(plan: Plan, i: int, *rows: PolicyRow) -> Plan:
    """The plan with a row replaced by others, or left out."""
    old = plan.summary.policy.rows
    return with_policy(plan, rows=(*old[:i], *rows, *old[i + 1 :]))


def rows(plan: Plan) -> list[tuple[int, PolicyRow]]:
    """The rows of a table, none where there is no table."""
    return list(enumerate(plan.summary.policy.rows))


@mutant("sharing")
def table_of_another_calibration(plan: Plan) -> Iterator[Plan]:
    if plan.summary.policy.rows:
        yield with_policy(plan, surface="0" * 16)
        yield with_policy(plan, surface="")


@mutant("sharing")
def table_where_nothing_was_measured(plan: Plan) -> Iterator[Plan]:
    if not plan.summary.policy.rows:
        row = PolicyRow(live_at_most=1, from_tokens=0, chunk_tokens=0, sms=0, alone_s=0.0, decode_s=0.0, hidden_s=0.0)
        yield with_policy(plan, rows=(row,))
        yield with_policy(plan, surface="0" * 16)
        yield with_policy(plan, mps_s=1.0)


@mutant("sharing")
def table_without_a_row(plan: Plan) -> Iterator[Plan]:
    """The first row covers the largest batch, the others have seconds of decode."""
    for i, _ in rows(plan):
        yield with_row(plan, i)


@mutant("sharing")
def table_with_a_row_twice(plan: Plan) -> Iterator[Plan]:
    for i, row in rows(plan):
        yield with_row(plan, i, row, row)


@mutant("sharing")
def table_in_another_order(plan: Plan) -> Iterator[Plan]:
    for (i, a), (_, b) in zip(rows(plan), rows(plan)[1:], strict=False):
        swapped = with_row(plan, i, b)
        yield with_row(swapped, i + 1, a)


@mutant("sharing")
def row_with_other_seconds(plan: Plan) -> Iterator[Plan]:
    for i, row in rows(plan):
        for name in ("alone_s", "decode_s", "hidden_s"):
            yield with_row(plan, i, row.model_copy(update={name: getattr(row, name) + 0.5}))


@mutant("sharing")
def row_that_holds_from_another_token(plan: Plan) -> Iterator[Plan]:
    """Sooner, later, never by its tokens, or from the token of its neighbour."""
    for i, row in rows(plan):
        neighbours = [other.from_tokens for _, other in rows(plan)[i + 1 : i + 2]]
        for tokens in (row.from_tokens - 1, row.from_tokens + 1, 10**6, *neighbours):
            if tokens >= 0:
                yield with_row(plan, i, row.model_copy(update={"from_tokens": tokens}))


@mutant("sharing")
def row_for_another_batch(plan: Plan) -> Iterator[Plan]:
    """One more or one less, where the rows stay in order."""
    for i, row in rows(plan):
        others = {other.live_at_most for _, other in rows(plan)}
        for live in {row.live_at_most - 1, row.live_at_most + 1} - others - {0}:
            yield with_row(plan, i, row.model_copy(update={"live_at_most": live}))


@mutant("sharing")
def row_that_is_missing_beside_one_that_takes_its_seconds(plan: Plan) -> Iterator[Plan]:
    for (i, a), (_, b) in zip(rows(plan), rows(plan)[1:], strict=False):
        both = {name: getattr(a, name) + getattr(b, name) for name in ("alone_s", "decode_s", "hidden_s")}
        yield with_row(with_row(plan, i + 1), i, a.model_copy(update=both))


@mutant("sharing")
def row_on_sms_that_nobody_measured(plan: Plan) -> Iterator[Plan]:
    for i, row in rows(plan):
        for sms in (row.sms + 1, 1000):
            yield with_row(plan, i, row.model_copy(update={"sms": sms}))


@mutant("sharing")
def row_of_chunks_that_engines_do_not_cut(plan: Plan) -> Iterator[Plan]:
    for i, row in rows(plan):
        yield with_row(plan, i, row.model_copy(update={"chunk_tokens": 1024}))


@mutant("sharing")
def row_that_prefixes_do_not_wait_in(plan: Plan) -> Iterator[Plan]:
    """Or wait in: with the seconds of the way that is told no more."""
    for i, row in rows(plan):
        if row.hidden_s:
            yield with_row(plan, i, row.model_copy(update={"sms": 0, "chunk_tokens": 0}))


@mutant("sharing")
def mps_default_that_takes_another_time(plan: Plan) -> Iterator[Plan]:
    policy = plan.summary.policy
    if policy.rows:
        yield with_policy(plan, mps_s=(policy.mps_s or 0.0) + 0.5)
    if policy.mps_s is not None:
        yield with_policy(plan, mps_s=None)


@mutant("solver")
def result_of_another_table(plan: Plan) -> Iterator[Plan]:
    """Value and bound agree with each other, not with the rows; a bound that nothing proves; no result, or one more."""
    results = plan.summary.solvers
    for i, told in enumerate(results):
        if told.name == "share-policy":
            shifted = {"value": told.value - 0.5, "bound": told.bound - 0.5}
            unproven = {"status": "feasible", "bound": told.bound - 0.5}
            for fields in (shifted, unproven, {"objective": "step seconds"}):
                yield summarise(plan, solvers=(*results[:i], told.model_copy(update=fields), *results[i + 1 :]))
            yield summarise(plan, solvers=(*results[:i], *results[i + 1 :]))
    if plan.summary.policy.kind != "solved":
        told = SolverResult(name="share-policy", status="optimal", objective="P1 seconds", value=1.0, bound=1.0)
        yield summarise(plan, solvers=(*results, told))


@mutant("sharing")
def calibration_with_another_figure(plan: Plan) -> Iterator[Plan]:
    """The job's surface is another than the one that the table was made of."""
    found = plan.job["cluster"].get("calibration")
    if found and plan.summary.policy.rows:
        measured = found["surface"]["rows"]
        other = [{**row, "step_s": row["step_s"] * 1.5} for row in measured]
        yield with_job(plan, "cluster", "calibration", "surface", "rows", value=other)
        yield with_job(plan, "cluster", "calibration", "hbm_gb_s", value=1.0)
