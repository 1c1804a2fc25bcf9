"""How prefix work and decode share a GPU, as the plan page tells it.

policy     solved: the table of the surface under which decode and prefixes end first
           98% of the prefix work is done beside decode; both take 9.04 s, 9.51 s under MPS default
           responses that decode: SMs for prefixes of 6000 tokens: 128 to 41: wait | from token 555, or 40 to 13: 96 |
           from token 814, or 12 to 1: 80
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich.text import Text

from rollplex.ir.plan import Plan
from rollplex.ir.planned_sharing import Policy, PolicyRow
from rollplex.show.text import LABEL, WIDTH, joined, labelled, seconds, under


def policy_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """The kind of sharing, and where a surface tells it, what it does."""
    policy = plan.summary.policy
    share = f", {policy.share:.0%} of the SMs for prefix work" if policy.share is not None else ""
    lines = labelled("policy", policy.kind + share + (f": {policy.why}" if policy.why else ""), width)
    return lines + [text for row in sharing_rows(plan, width - LABEL) for text in under(row, width)]


def sharing_rows(plan: Plan, width: int) -> Iterator[str]:
    """What is hidden and how long both take; where ways change, the table."""
    policy, prefix_s = plan.summary.policy, plan.summary.times.prefix_s
    if not policy.rows:
        return
    hidden = policy.hidden_s / prefix_s if prefix_s else 0.0
    both = sum(row.decode_s for row in policy.rows) + max(prefix_s - policy.hidden_s, 0.0)
    mps = f", {seconds(policy.mps_s)} under MPS default" if policy.mps_s is not None else ""
    yield f"{hidden:.0%} of the prefix work is done beside decode; both take {seconds(both)}{mps}"
    if policy.kind == "solved":
        yield from joined([_head(policy), *_stretches(policy.rows)], width)


def _head(policy: Policy) -> str:
    chunk = max(row.chunk_tokens for row in policy.rows)
    return "responses that decode: SMs" + (f" for prefixes of {chunk} tokens" if chunk else "")


def _stretches(rows: tuple[PolicyRow, ...]) -> Iterator[str]:
    """Neighbours of one way as one: `from token 555, or 40 to 13: 96`; the first holds until another does."""
    ends = [*(row.live_at_most + 1 for row in rows[1:]), 1]
    for sms, found in groupby(zip(rows, ends, strict=True), key=lambda at: at[0].sms):
        stretch = list(found)
        begins, last = stretch[0][0], stretch[-1][1]
        old = f"from token {begins.from_tokens}, or " if begins is not rows[0] else ""
        batches = f"{begins.live_at_most} to {last}" if last < begins.live_at_most else f"{last}"
        yield f"{old}{batches}: {sms or 'wait'}"
