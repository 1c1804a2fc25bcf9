"""What an engine tells of its decode while it runs, and a prefix that begins by it: a whole step on the host.

rollout  FULL  4,0  4,1  4,2  4,3 (waits for the prefix)  4,4 ..      rows  at most 4: wait     1, or from token 3
prefix   waits ................... begins
"""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
from runtime_threads import InThreads
from runtime_tiny import luck, tiny_plan
from test_live import row

from rollplex.backends.live import Live
from rollplex.ir.plan import Plan
from rollplex.ir.planned_sharing import Policy

PATIENCE_S = 10


def held_until(token: int) -> Plan:
    """The tiny job, whose prefixes wait until one response decodes or all have so many tokens."""
    plan = tiny_plan()
    policy = Policy(kind="solved", rows=(row(4, 0, 0), row(1, 1, token)))
    return plan.model_copy(update={"summary": plan.summary.model_copy(update={"policy": policy})})


def test_prefixes_begin_by_tokens_while_more_decode_than_their_row_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode goes no further than the token until a prefix has begun, or it is clear that none does."""
    run = InThreads(held_until(3), {"reward": luck})
    begun, told, seen = threading.Event(), list[Live](), list[Live]()
    tell, may_begin = run.rollout._live.tell, run.train._beside.may_begin

    def telling(responses: int, tokens: int = 0) -> None:
        told.append(Live(responses, tokens))
        tell(responses, tokens)
        if tokens == 3:
            begun.wait(PATIENCE_S)

    def looking() -> bool:
        if may := may_begin():
            seen.append(told[-1])
            begun.set()
        return may

    monkeypatch.setattr(run.rollout.sampler, "_live", telling)
    monkeypatch.setattr(run.train._beside, "may_begin", looking)
    run.step(0)
    run.close()
    assert seen[0].tokens == 3
    assert seen[0].responses > 1
    assert [live.tokens for live in told if live.tokens] == list(range(1, told[-1].tokens + 1))
    assert all(a.responses >= b.responses for a, b in pairwise(told))
