"""Faults of size and choice: bytes that the job does not give, weight classes and degrees of another model or job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mutants.agree import with_job
from mutants.edit import change, mutant, objects, put, steps, summarise, with_layout, with_object
from mutants.layout import classes, with_class
from rollplex.ir.check.sizes import OF_PROCESSES, OF_ROLES, OF_TURNS
from rollplex.ir.engines import engine
from rollplex.ir.hardware import COMMUNICATOR_MIB
from rollplex.ir.plan import Candidate, Plan
from rollplex.ir.planned_job import job_of
from rollplex.ir.steps import Exchange, Run, UpdateChunk
from rollplex.ir.work import one_response, role_work
from rollplex.passes.update_sizes import state_itemsize, workspace_name

PAGE = 2 << 20


@mutant("size")
def object_of_another_size(plan: Plan) -> Iterator[Plan]:
    """One byte too small for its job, or a page too large."""
    for o in plan.summary.objects:
        if o.name in OF_PROCESSES or o.name.rpartition(".")[2] in (*OF_ROLES, *OF_TURNS):
            yield with_object(plan, o.name, bytes=o.bytes + PAGE)
            yield with_object(plan, o.name, bytes=max(0, o.bytes - PAGE))


@mutant("size")
def communicator_of_ranks_that_have_one(plan: Plan) -> Iterator[Plan]:
    """A rank's slabs are gathered among its tensor-parallel ranks, and counted as another group's."""
    own = objects(plan).get("train.context")
    if own and own.bytes and plan.job["cluster"]["nccl_gib"] is None:
        yield with_object(plan, own.name, bytes=own.bytes + COMMUNICATOR_MIB * 2**20)


@mutant("size")
def made_again_without_room(plan: Plan) -> Iterator[Plan]:
    """What its prefix has saved is used by no backward, which has the room of one that finds it."""
    for saved in (o for o in plan.summary.objects if o.recomputable and _grows(plan, o.role)):
        for process, i, step in steps(plan, Run):
            if step.task == "prefix_backward" and saved.name in (*step.reads, *step.streams):
                without = {k: tuple(n for n in getattr(step, k) if n != saved.name) for k in ("reads", "streams")}
                yield put(plan, process, i, step.model_copy(update=without))


def _grows(plan: Plan, role: str) -> bool:
    """Whether a backward that makes its prefix again is the largest of a role's training steps."""
    job = job_of(plan)
    if job.workload.turn_count > 1:  # whose largest step may be another turn's
        return False
    facts = engine(job.trainer(role).engine)
    work = one_response(role_work(job, role), plan.summary.chunks.microbatch.suffix_responses)
    return facts.train_activation_bytes(replace(work, dropped=True)) > facts.train_activation_bytes(work)


@mutant("size")
def chunks_in_flight_that_there_are_not(plan: Plan) -> Iterator[Plan]:
    """Of fewer chunks than may overlap, as many as may are counted: more states than a rank has."""
    job, chunks = job_of(plan), [s for _, _, s in steps(plan, UpdateChunk)]
    for role in sorted({s.role for s in chunks if s.streams}):
        parameters = max(s.stop for s in chunks if s.role == role)
        more = (job.optimizer.in_flight * plan.summary.chunks.of(role).elements - parameters) * 4 * state_itemsize(job)
        name = workspace_name(job, role)
        if more >= job.device.page_bytes and name in objects(plan):
            yield with_object(plan, name, bytes=objects(plan)[name].bytes + more)


@mutant("size")
def prefix_with_its_group_has_a_room_of_its_own(plan: Plan) -> Iterator[Plan]:
    """Temporaries of a prefix are counted beside those of the step that follows it."""
    for role in (r for r in job_of(plan).trained if job_of(plan).with_group(r)):
        beside = objects(plan)["train.activations"].model_copy(update={"name": f"{role}.prefix_workspace"})
        yield summarise(plan, objects=(*plan.summary.objects, beside))


@mutant("size")
def prefix_with_its_group_without_room(plan: Plan) -> Iterator[Plan]:
    """Where a prefix has more temporaries than its group's step, the room is that of the step."""
    chosen = plan.summary.chunks.microbatch.suffix_responses
    job = job_of(plan)
    for role in (r for r in job.trained if job.with_group(r)):
        work, facts = role_work(job, role), engine(job.trainer(role).engine)
        step = facts.train_activation_bytes(one_response(work, chosen))
        if facts.prefix_workspace_bytes(work, True) - step >= job.device.page_bytes:
            name = "train.activations" if role == job.policy else f"{role}.activations"
            yield with_object(plan, name, bytes=step)


@mutant("class")
def object_of_another_class(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        for other in ("permanent", "regenerable", "boundary", "phase-local"):
            sized = o.name in OF_PROCESSES or o.name.rpartition(".")[2] in (*OF_ROLES, *OF_TURNS)
            if sized and other != o.class_:
                yield with_object(plan, o.name, class_=other)


@mutant("size", "asked")
def job_of_longer_prompts(plan: Plan) -> Iterator[Plan]:
    yield with_job(plan, "workload", "prompt_tokens", value=plan.job["workload"]["prompt_tokens"] * 2)


@mutant("asked")
def saved_state_where_the_job_does_not_want_it(plan: Plan) -> Iterator[Plan]:
    for o in plan.summary.objects:
        places = set(o.residency.values()) - {"-"}
        for wanted in ("hbm", "host", "dropped") if o.attached and o.class_ == "phase-local" else ():
            if places - {wanted}:
                yield with_job(plan, "roles", o.role, "prefix_saved", value=wanted)


@mutant("asked")
def copies_of_another_job(plan: Plan) -> Iterator[Plan]:
    """The training ranks repeat a role's model, or cut its optimizer, as the job does not say."""
    kind = plan.processes["train"]
    for role in plan.job["roles"]:
        edits: list[dict[str, Any]] = [
            {"role_data_parallel": {**kind.role_data_parallel, role: kind.copies(role) * 2}},
            {"role_replicas": {**kind.role_replicas, role: kind.replicas(role) * 2}},
            {"fully_sharded": tuple({*kind.fully_sharded} ^ {role})},
            {"distributed_optimizer": tuple({*kind.distributed_optimizer} ^ {role})},
        ]
        for fields in edits:
            yield plan.model_copy(update={"processes": {**plan.processes, "train": kind.model_copy(update=fields)}})


# ---- weight classes


@mutant("layout-class")
def class_of_another_model(plan: Plan) -> Iterator[Plan]:
    for c in classes(plan):
        for what in ("tensors", "params", "shard_bytes", "pieces", "slabs"):
            yield with_class(plan, c.name, **{what: getattr(c, what) + 1})


@mutant("layout-class")
def tensor_unlike_its_class(plan: Plan) -> Iterator[Plan]:
    listed = plan.summary.layout.tensors
    for i in {next((i for i, t in enumerate(listed) if t.case == k), -1) for k in (1, 2, 3)} - {-1}:
        changed = listed[i].model_copy(update={"slabs": listed[i].slabs + 1})
        yield with_layout(plan, tensors=(*listed[:i], changed, *listed[i + 1 :]))


@mutant("layout-class")
def needs_of_nobody(plan: Plan) -> Iterator[Plan]:
    yield with_layout(plan, needs=(*plan.summary.layout.needs, "an engine that can do more"))


@mutant("layout-alternative")
def alternative_that_does_not_add_up(plan: Plan) -> Iterator[Plan]:
    told = plan.summary.layout.alternatives
    for i, a in enumerate(told):
        case = a.cases["2"]
        edits: list[dict[str, Any]] = [
            {"case3_buffer_bytes": a.case3_buffer_bytes + 1},
            {"cases": {**a.cases, "2": case.model_copy(update={"params": case.params + 1})}},
            {"cases": {**a.cases, "2": case.model_copy(update={"bytes": case.bytes + 1})}},
        ]
        for fields in edits:
            yield with_layout(plan, alternatives=(*told[:i], a.model_copy(update=fields), *told[i + 1 :]))
        yield with_layout(plan, alternatives=(*told[:i], *told[i + 1 :]))
        yield with_layout(plan, alternatives=(*told, a))


@mutant("layout-exchange")
def shard_of_another_size_sent(plan: Plan) -> Iterator[Plan]:
    if not classes(plan):
        yield with_layout(plan, exchange_bytes_per_gpu=plan.summary.layout.exchange_bytes_per_gpu + 1)


@mutant("layout-exchange", "missing-exchange")
def tower_sent_by_nobody(plan: Plan) -> Iterator[Plan]:
    yield with_layout(plan, tower_bytes=plan.summary.layout.tower_bytes + 1)


@mutant("missing-exchange")
def slabs_from_one_rank(plan: Plan) -> Iterator[Plan]:
    """What every rank has a piece of is sent by one of them."""
    for process, i, step in steps(plan, Exchange):
        if step.op in ("all_gather", "write"):
            yield put(plan, process, i, change(step, op="broadcast"))


# ---- degrees


@mutant("degrees")
def degrees_of_another_job(plan: Plan) -> Iterator[Plan]:
    key, wide = "roles.actor.train.tensor_parallel", plan.job["roles"]["actor"]["train"]["tensor_parallel"]
    yield summarise(plan, degrees={key: wide * 2})
    yield summarise(plan, degrees={}, runners_up=(_other({key: wide}),))
    for degrees in ({key: wide}, {key: 3 * wide}, {key: wide, "cluster.nodes": 2}):
        yield summarise(plan, degrees={key: wide}, runners_up=(_other(degrees),))


@mutant("degrees")
def choice_that_contradicts_itself(plan: Plan) -> Iterator[Plan]:
    """It fits and says why not, has no step, is larger than a GPU, or would have been the better one."""
    key, wide = "roles.actor.train.tensor_parallel", plan.job["roles"]["actor"]["train"]["tensor_parallel"]
    step, capacity = plan.summary.times.step_s, plan.summary.capacity_bytes
    edits: list[dict[str, Any]] = [
        {"why_not": "no reason"},
        {"step_s": None},
        {"peak_bytes": capacity + 1},
        {"compiled": False},
        *([{"step_s": step / 2}] if step else []),
    ]
    for fields in edits:
        good = {"feasible": True, "step_s": step + 1.0, "peak_bytes": 1, "why_not": "", "compiled": True}
        yield summarise(plan, degrees={key: wide}, runners_up=(_other({key: wide * 2}, **{**good, **fields}),))


def _other(degrees: dict[str, int], **fields: Any) -> Candidate:
    told: dict[str, Any] = {"feasible": False, "step_s": 1.0, "peak_bytes": 1, "why_not": "too large", **fields}
    return Candidate(degrees=degrees, **told)
