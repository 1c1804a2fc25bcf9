"""Faults of who shares GPUs with whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.edit import change, mutant, objects, put, steps, summarise, with_object, with_window
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Exchange


def _process(plan: Plan, name: str, **fields: Any) -> Plan:
    """The plan with other fields in one kind of process."""
    kind = plan.processes[name].model_copy(update=fields)
    return plan.model_copy(update={"processes": {**plan.processes, name: kind}})


def _home(plan: Plan, name: str) -> str:
    return plan.processes[name].pool


@mutant("pool")
def process_on_another_pool(plan: Plan) -> Iterator[Plan]:
    """Two pools become one, or one becomes two, and the summary says nothing of it."""
    if _home(plan, "train") == _home(plan, "rollout"):
        yield _process(plan, "rollout", pool="elsewhere")
    else:
        yield _process(plan, "rollout", pool=_home(plan, "train"))


@mutant("pool")
def process_without_a_gpu(plan: Plan) -> Iterator[Plan]:
    for name in ("train", "rollout"):
        yield _process(plan, name, pool="")


@mutant("pool")
def pages_imported_from_another_pool(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        other = "rollout" if o.process == "train" else "train"
        if _home(plan, other) != _home(plan, o.process):
            yield with_object(plan, o.name, readers=(other,))


@mutant("pool")
def pool_left_out(plan: Plan) -> Iterator[Plan]:
    if len(plan.summary.pools) > 1:
        yield from (summarise(plan, pools=(p,)) for p in plan.summary.pools)


@mutant("pool")
def pool_of_another_size(plan: Plan) -> Iterator[Plan]:
    for i in range(len(plan.summary.pools)):
        others = [q.model_copy(update={"gpus": q.gpus + (i == j)}) for j, q in enumerate(plan.summary.pools)]
        yield summarise(plan, pools=tuple(others))


@mutant("peak")
def wrong_peak_of_a_pool(plan: Plan) -> Iterator[Plan]:
    for i in range(len(plan.summary.pools)):
        for field in ("peak_hbm_bytes", "peak_host_bytes"):
            pools = list(plan.summary.pools)
            pools[i] = pools[i].model_copy(update={field: getattr(pools[i], field) + 1})
            yield summarise(plan, pools=tuple(pools))


@mutant("window-bytes")
def pools_added_up(plan: Plan) -> Iterator[Plan]:
    """A window that says the bytes of both pools are on one GPU."""
    for w in plan.summary.windows:
        if w.hbm_bytes != sum(w.by_object.values()):
            yield with_window(plan, w.name, hbm_bytes=sum(w.by_object.values()))


@mutant("missing-exchange")
def fewer_bytes_sent(plan: Plan) -> Iterator[Plan]:
    """Both sides enter, and less than the copy crosses."""
    for _, i, step in steps(plan, Exchange, process="rollout"):
        other = next(j for _, j, s in steps(plan, Exchange, process="train") if s.group == step.group)
        less = {"nbytes": step.nbytes - 1}
        made = put(plan, "rollout", i, change(step, **less))
        yield put(made, "train", other, change(plan.programs["train"][other], **less))


@mutant("missing-exchange")
def old_weights_sent(plan: Plan) -> Iterator[Plan]:
    """The trainer enters with something that no chunk has written."""
    old = [name for name in ("reference.weights", "actor.base") if name in objects(plan)]
    for _, i, step in steps(plan, Exchange, process="train"):
        if any(s.group == step.group for _, _, s in steps(plan, Exchange, process="rollout")):
            yield from (put(plan, "train", i, change(step, object=name)) for name in old)
