"""Faults of agreement: with the job, within the graph, between graph and loss, among the figures of the summary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mutants.edit import change, mutant, put, steps, summarise, with_object
from rollplex.ir.plan import NodeRecord, Plan
from rollplex.ir.steps import Run


def with_job(plan: Plan, *path: str, value: Any) -> Plan:
    """The plan for a job with another value under a key."""

    def put(section: dict[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
        return {**section, keys[0]: put(section.get(keys[0], {}), keys[1:]) if keys[1:] else value}

    return plan.model_copy(update={"job": put(plan.job, path)})


def with_loss(plan: Plan, of: str, **fields: Any) -> Plan:
    """The plan with other fields in the loss of a role."""
    return plan.model_copy(update={"losses": {**plan.losses, of: plan.losses[of].model_copy(update=fields)}})


# ---- the job


@mutant("asked")
def capacity_of_another_gpu(plan: Plan) -> Iterator[Plan]:
    yield summarise(plan, capacity_bytes=plan.summary.capacity_bytes + 1)
    yield summarise(plan, host_capacity_bytes=plan.summary.host_capacity_bytes + 1)


@mutant("asked")
def schedule_of_another_job(plan: Plan) -> Iterator[Plan]:
    yield plan.model_copy(update={"schedule": "serial" if plan.schedule != "serial" else "rollplex"})


@mutant("asked")
def engine_or_degree_of_another_job(plan: Plan) -> Iterator[Plan]:
    for name in ("train", "rollout"):
        kind = plan.processes[name]
        for fields in ({"engine": "other"}, {"tensor_parallel": kind.tensor_parallel * 2}):
            yield plan.model_copy(update={"processes": {**plan.processes, name: kind.model_copy(update=fields)}})


@mutant("asked")
def job_that_would_be_refused(plan: Plan) -> Iterator[Plan]:
    yield with_job(plan, "cluster", "gpu", value="H801")
    yield with_job(plan, "workload", "prompts", value=0)


@mutant("asked")
def object_of_an_unknown_role(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        yield with_object(plan, o.name, role="nobody")


@mutant("asked")
def another_sharing_policy(plan: Plan) -> Iterator[Plan]:
    told = plan.summary.policy
    yield summarise(plan, policy=told.model_copy(update={"kind": "none" if told.kind == "mps" else "mps"}))
    yield summarise(plan, policy=told.model_copy(update={"share": 0.25}))


@mutant("asked")
def more_responses_than_the_job_samples(plan: Plan) -> Iterator[Plan]:
    for i, record in enumerate(plan.graph):
        if record.op == "rx.generate":
            yield with_record(plan, i, kwargs={"n": record.kwargs["n"] + 1})


@mutant("asked")
def head_of_another_model(plan: Plan) -> Iterator[Plan]:
    for i, record in enumerate(plan.graph):
        if "head" in record.kwargs:
            yield with_record(plan, i, kwargs={**record.kwargs, "head": "logprobs"})


@mutant("asked")
def executable_after_all(plan: Plan) -> Iterator[Plan]:
    for i in range(len(plan.not_executable)):
        yield plan.model_copy(update={"not_executable": (*plan.not_executable[:i], *plan.not_executable[i + 1 :])})


@mutant("asked")
def refused_without_a_ground(plan: Plan) -> Iterator[Plan]:
    yield plan.model_copy(update={"not_executable": (*plan.not_executable, "engine none: it is not there")})


# ---- the graph


def with_record(plan: Plan, i: int, **fields: Any) -> Plan:
    """The plan with other fields in one record of its graph."""
    changed = plan.graph[i].model_copy(update=fields)
    return plan.model_copy(update={"graph": (*plan.graph[:i], changed, *plan.graph[i + 1 :])})


@mutant("graph")
def record_twice(plan: Plan) -> Iterator[Plan]:
    for record in plan.graph:
        yield plan.model_copy(update={"graph": (*plan.graph, record)})


@mutant("graph")
def record_of_another_phase(plan: Plan) -> Iterator[Plan]:
    for i, record in enumerate(plan.graph):
        yield with_record(plan, i, phase="P3" if record.phase != "P3" else "P1")


@mutant("graph")
def record_that_reads_a_later_one(plan: Plan) -> Iterator[Plan]:
    for i, record in enumerate(plan.graph[:-1]):
        yield with_record(plan, i, args=(*record.args, {"ref": plan.graph[-1].name}))


@mutant("graph")
def update_of_another_role(plan: Plan) -> Iterator[Plan]:
    for i, record in enumerate(plan.graph):
        if record.op == "rx.update":
            yield with_record(plan, i, args=("reference", *record.args[1:]))


@mutant("graph")
def host_function_of_another_name(plan: Plan) -> Iterator[Plan]:
    for name in plan.hosts:
        yield plan.model_copy(update={"hosts": {**plan.hosts, name: "nobody"}})
        yield plan.model_copy(update={"hosts": {n: f for n, f in plan.hosts.items() if n != name}})
    yield plan.model_copy(update={"hosts": {**plan.hosts, "more": "reward"}})


# ---- the loss


def edited_records(records: tuple[NodeRecord, ...]) -> Iterator[tuple[NodeRecord, ...]]:
    """One record left out, doubled, renamed, with another op, other arguments."""
    for i, record in enumerate(records):
        others = (
            (), (record, record), (record.model_copy(update={"name": record.name + "2"}),),
            (record.model_copy(update={"op": "torch.sin"}),), (record.model_copy(update={"args": record.args[::-1]}),),
            (record.model_copy(update={"kwargs": {**record.kwargs, "eps": 0.5}}),),
        )  # fmt: skip
        for new in others:
            if new != (record,):
                yield (*records[:i], *new, *records[i + 1 :])


@mutant("loss")
def loss_with_another_record(plan: Plan) -> Iterator[Plan]:
    for role, loss in plan.losses.items():
        yield from (with_loss(plan, role, step=step) for step in edited_records(loss.step))
        yield from (with_loss(plan, role, group=group) for group in edited_records(loss.group))


@mutant("loss")
def loss_that_reads_itself(plan: Plan) -> Iterator[Plan]:
    """A record is made of its own value, or of one that is made of it: no walk behind it ends by itself."""
    for role, loss in plan.losses.items():
        for i, record in enumerate(loss.step):
            for later in (record, loss.step[-1]):
                knot = record.model_copy(update={"args": (*record.args, {"ref": later.name})})
                yield with_loss(plan, role, step=(*loss.step[:i], knot, *loss.step[i + 1 :]))


@mutant("loss")
def loss_with_another_list(plan: Plan) -> Iterator[Plan]:
    for role, loss in plan.losses.items():
        for name in ("forward", "wide", "wide_inputs", "sliced", "whole"):
            was = getattr(loss, name)
            for i in range(len(was)):
                yield with_loss(plan, role, **{name: (*was[:i], *was[i + 1 :])})
            yield with_loss(plan, role, **{name: (*was, "more")})


@mutant("loss")
def loss_with_another_divisor(plan: Plan) -> Iterator[Plan]:
    """Left to the end though groups are divided by it, or the other way round; made of something else."""
    for role, loss in plan.losses.items():
        for name in {"", *loss.wide, loss.step[0].name} - {loss.divisor}:
            yield with_loss(plan, role, divisor=name)
        yield with_loss(plan, role, divisor_inputs=(*loss.divisor_inputs, "more"))
        if loss.divisor:
            yield with_loss(plan, role, divisor_inputs=())


@mutant("missing-input")
def divisor_made_of_other_values(plan: Plan) -> Iterator[Plan]:
    for process, i, step in steps(plan, Run):
        if step.task == "grad_norm":
            yield put(plan, process, i, change(step, inputs=(*step.inputs, "prompts")))
            if step.inputs:
                yield put(plan, process, i, change(step, inputs=()))


@mutant("loss")
def loss_of_another_value(plan: Plan) -> Iterator[Plan]:
    for role, loss in plan.losses.items():
        yield with_loss(plan, role, loss=loss.step[0].name)
        yield with_loss(plan, role, result=loss.group[0].name)
        yield with_loss(plan, role, role="reference")
        yield plan.model_copy(update={"losses": {r: taken for r, taken in plan.losses.items() if r != role}})


# ---- figures


@mutant("times")
def time_that_does_not_add_up(plan: Plan) -> Iterator[Plan]:
    t = plan.summary.times
    for name in ("decode_s", "prefix_s", "post_s", "exposed_transfer_s", "step_s", "saving_bound_s"):
        yield summarise(plan, times=t.model_copy(update={name: getattr(t, name) + 1.0}))
    yield summarise(plan, times=t.model_copy(update={"speedup_vs_serial": t.speedup_vs_serial + 0.01}))


@mutant("solver")
def optimum_beside_its_bound(plan: Plan) -> Iterator[Plan]:
    for i, s in enumerate(plan.summary.solvers):
        for fields in ({"bound": s.bound - 1}, {"bound": s.bound + 1}, {"status": "feasible"}):
            changed = s.model_copy(update=fields)
            yield summarise(plan, solvers=(*plan.summary.solvers[:i], changed, *plan.summary.solvers[i + 1 :]))
        yield summarise(plan, solvers=(*plan.summary.solvers, s))


@mutant("chunk-size")
def chunk_bytes_that_do_not_add_up(plan: Plan) -> Iterator[Plan]:
    chunks = plan.summary.chunks
    optimizer, microbatch = chunks.optimizer, chunks.microbatch
    for name in ("bytes", "workspace_bytes"):
        changed = optimizer.model_copy(update={name: getattr(optimizer, name) + 1})
        yield summarise(plan, chunks=chunks.model_copy(update={"optimizer": changed}))
    others: list[dict[str, Any]] = [{"prefix_prompts": 2}, {"suffix_responses": 7}]
    others += [
        {"workspace_bytes": {**microbatch.workspace_bytes, n: b + 1}} for n, b in microbatch.workspace_bytes.items()
    ]
    for fields in others:
        yield summarise(plan, chunks=chunks.model_copy(update={"microbatch": microbatch.model_copy(update=fields)}))
