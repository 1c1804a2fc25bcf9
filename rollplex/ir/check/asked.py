"""The plan is one for its job: capacities, schedule, engines, degrees and roles are those that the job asks for.

job.cluster  ->  capacity_bytes, host_capacity_bytes        job.roles  ->  processes, objects, calls of the graph
job.schedule ->  schedule                                   job.sharing -> policy
The job is the user's: what it holds is checked as a job file is, and taken for what is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rollplex.ir.check.degrees import check_degrees
from rollplex.ir.check.executable import executable
from rollplex.ir.check.facts import ROLLOUT_COMPLETE, TIMELINE, TOWER, Facts
from rollplex.ir.check.graph import is_call
from rollplex.ir.check.pieces import check_pieces
from rollplex.ir.check.release import check_release
from rollplex.ir.check.rules import Violation
from rollplex.ir.check.sharing import check_sharing
from rollplex.ir.check.sizes import check_sizes
from rollplex.ir.check.update import LARGEST_PAGE
from rollplex.ir.check.weight_classes import check_weight_classes
from rollplex.ir.errors import PlanError
from rollplex.ir.job import Job
from rollplex.ir.job_schema import OVERLAPPED
from rollplex.ir.lora import lora_of, reads_base, served_bytes, trained_parts, trained_spec
from rollplex.ir.plan import Plan
from rollplex.ir.planned_job import job_of
from rollplex.ir.shards import owned_parameters, rank_parameters, stage_parameters
from rollplex.ir.steps import UpdateChunk

DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")


def capacities(facts: Facts, job: Job) -> Iterator[Violation]:
    """A plan has the bytes that the job's GPUs and nodes have."""
    summary, share = facts.plan.summary, job.host_pool_bytes // job.cluster.gpus_per_node
    for what, told, asked in (
        ("capacity_bytes", summary.capacity_bytes, job.capacity_bytes),
        ("host_capacity_bytes", summary.host_capacity_bytes, share),
    ):
        if told != asked:
            yield Violation("asked", f"{what} are {told:,}, the job has {asked:,}", nbytes=asked)


def schedule(facts: Facts, job: Job) -> Iterator[Violation]:
    """The schedule is the job's."""
    if facts.plan.schedule != job.schedule:
        yield Violation("asked", f"schedule {facts.plan.schedule}, the job has {job.schedule}")


def engines(facts: Facts, job: Job) -> Iterator[Violation]:
    """Trainer and rollout engine are the policy's."""
    sections = {"train": job.trainer(job.policy), "rollout": job.roles[job.policy].rollout}
    for process, section in sections.items():
        kind = facts.plan.processes.get(process)
        if kind is None or section is None:
            yield Violation("asked", f"no process runs the policy's {process} engine", where=process)
            continue
        for what in ("engine", *DEGREES):
            told, asked = getattr(kind, what), getattr(section, what, 1)  # a rollout engine has a TP alone
            if told != asked:
                yield Violation("asked", f"{what} {told}, the job has {asked}", where=process)
    yield from _repeated(facts, job)
    for name, kind in facts.plan.processes.items():
        alone = kind.ranks == 1 and all(getattr(kind, d) == 1 for d in DEGREES)
        if name not in sections and (kind.engine != name or not alone):
            yield Violation("asked", f"{kind.ranks} ranks of {kind.engine}, it is one process of its own", where=name)


def _repeated(facts: Facts, job: Job) -> Iterator[Violation]:
    """How often each role's model is there, and what of it is cut over the ranks that repeat it."""
    kind = facts.plan.processes[TIMELINE]
    for role in job.roles:
        degrees = job.degrees(role)
        for what, told, asked in (
            ("copies", kind.copies(role), degrees.dp),
            ("replicas", kind.replicas(role), degrees.replicas),
            ("cut optimizers", role in kind.distributed_optimizer, role in job.trained and job.cuts_optimizer(role)),
            ("cut weights", role in kind.fully_sharded, role in job.trained and job.zero(role) == 3),
        ):
            if told != asked:
                yield Violation("asked", f"{what} of {role}: {told}, the job's degrees give {asked}", where=TIMELINE)
    named = (kind.role_data_parallel, kind.role_replicas, kind.distributed_optimizer, kind.fully_sharded)
    for role in sorted({r for roles in named for r in roles} - set(job.roles)):
        yield Violation("asked", f"it repeats {role}, which the job does not have", where=TIMELINE)


def budgets(facts: Facts, job: Job) -> Iterator[Violation]:
    """Prompts, rollout memory and chunks are those that the job states."""
    for role, o in ((role, o) for role, found in facts.pieces.items() for o in found):
        if role not in job.roles:
            continue
        taken, sampled = job.prompts_of(role), job.sampled // job.data_parallel(role)
        if role in facts.with_group:
            if o.slots != 1:
                what = f"{o.name} has {o.slots} groups, and the prefix of {role} runs with its group: 1 at a time"
                yield Violation("asked", what, object=o.name, where=o.name)
        elif o.slots not in (taken, sampled):
            more = f" of {sampled}" if sampled != taken else ""
            what = f"{o.name} has {o.slots} groups, a rank of {role} works on {taken}{more} prompts"
            yield Violation("asked", what, object=o.name, where=o.name)
    for case, told in facts.plan.summary.layout.cases.items():
        if told.bytes != told.params * job.itemsize:
            what = f"case {case}: {told.params:,} parameters of {job.model.dtype} have {told.bytes:,} bytes"
            yield Violation("asked", what, nbytes=told.bytes, where="layout")
    held = {n for _, s in facts.runs("generate") for n in s.writes}
    for nbytes in (job.kv_cache_bytes, job.runtime_bytes):
        if nbytes and not any(0 <= facts.objects[n].bytes - nbytes < LARGEST_PAGE for n in held):
            yield Violation("asked", f"nothing that decode writes has the job's {nbytes:,} bytes", nbytes=nbytes)
    for role in (r for r in facts.trained if r in job.roles):
        held = owned_parameters if job.cuts_optimizer(role) else rank_parameters
        total = held(trained_spec(job, role), job.degrees(role), *trained_parts(job, role))
        last = max(at.step.stop for at in facts.steps() if isinstance(at.step, UpdateChunk) and at.step.role == role)
        if last != total:
            yield Violation("chunk-cover", f"{last:,} elements are updated, a rank has {total:,}", where=role)
    count, asked = facts.plan.summary.chunks.optimizer.count, job.optimizer.chunks
    whole = facts.plan.schedule == "naive"  # it streams nothing, whatever the job says of chunks
    if asked not in ("auto", count) and not whole:
        yield Violation("asked", f"{count} chunks, the job has {asked}", where="chunks")


def lacking(facts: Facts, job: Job) -> Iterator[Violation]:
    """The GPU that receives most lacks of its rollout shard what the emptiest stage lacks.

    Where ranks outnumber KV heads, K and V repeat and a training rank's rows are not all of its GPU's shard.
    """
    layout = facts.plan.summary.layout
    if not layout.classes or lora_of(job) is not None:  # whose base never changes
        return
    spec, degrees = job.spec, job.degrees(job.policy)
    held = min(sum(stage_parameters(spec, degrees, stage, "language")) for stage in range(degrees.pp))
    least = (spec.rank_parameters(job.rollout_tp, "language") - held) * job.itemsize
    told, exact = layout.exchange_bytes_per_gpu, degrees.tp <= spec.kv_heads
    if told < least or (exact and told != least):
        what = f"a GPU receives {told:,} bytes after an update, its training rank lacks {least:,} of the rollout shard"
        yield Violation("layout-exchange", what, nbytes=least, where="layout")


def roles(facts: Facts, job: Job) -> Iterator[Violation]:
    """Objects and calls belong to roles of the job; responses are as many as it samples."""
    for o in facts.objects.values():
        own = not o.role and o.class_ in ("permanent", "phase-local")  # of the process itself
        if o.role not in job.roles and not own:
            yield Violation(
                "asked", f"{o.name} belongs to {o.role or 'no role'}, which the job does not have", object=o.name
            )
    for record in facts.plan.graph:
        if is_call(record) and record.op != "rx.host" and record.args[0] not in tuple(job.roles):
            yield Violation("asked", f"it calls {record.args[0]}, which is no role of the job", where=f"%{record.name}")
        n = record.kwargs.get("n", record.args[2] if len(record.args) > 2 else None)
        each = job.group if facts.turn[record.name] == 1 else 1
        if record.op == "rx.generate" and n != each:
            yield Violation("asked", f"it samples {n} responses, the job {each}", where=f"%{record.name}")


SCALAR_HEADS = ("values", "score")
"""What a call takes of a model that ends in one number; log-probabilities come of logits."""


def heads(facts: Facts, job: Job) -> Iterator[Violation]:
    """A call takes of its role what the role's model ends in."""
    named = tuple(job.roles)  # compared, not hashed: an edited argument may be anything
    for record in (r for r in facts.plan.graph if "head" in r.kwargs and r.args and r.args[0] in named):
        head, ends = record.kwargs["head"], job.spec_of(record.args[0]).head
        if head not in (SCALAR_HEADS if ends == "scalar" else ("logprobs",)):
            what = f"it takes {head} of {record.args[0]}, whose model ends in {ends}"
            yield Violation("asked", what, where=f"%{record.name}")


def adapters(facts: Facts, job: Job) -> Iterator[Violation]:
    """The rollout engine's adapters have the bytes of the job's; who reads a base is the same model, cut alike."""
    told, nbytes = facts.objects.get("rollout.adapters"), served_bytes(job)
    if (told is not None or nbytes) and not (told and 0 <= told.bytes - nbytes < LARGEST_PAGE):
        held = f"rollout.adapters has {told.bytes:,} bytes" if told else "there is no rollout.adapters"
        what = f"{held}, the job's adapters take {nbytes:,} on a rollout rank"
        yield Violation("asked", what, object="rollout.adapters", nbytes=nbytes)
    for at, step in facts.groups:
        lent = step.role in job.roles and step.role not in facts.adapted and facts.bases.intersection(step.reads)
        if lent and not reads_base(job, step.role):
            yield Violation("asked", f"{step.role} reads base weights that are not its own model's", at)


def sent(facts: Facts, job: Job) -> Iterator[Violation]:
    """Where no weights are shared an update sends a rollout rank its whole shard, or the adapters that it serves."""
    if job.shares_weights:
        return
    parts = trained_parts(job, job.policy)
    nbytes = job.spec.rank_parameters(job.rollout_tp, "language") * job.itemsize
    nbytes += job.spec.vision_parameters * job.itemsize if "vision" in parts else 0
    nbytes = served_bytes(job) or nbytes
    if (told := facts.plan.summary.layout.exchange_bytes_per_gpu) != nbytes:
        what = f"an update sends {told:,} bytes to a GPU, what it changes takes {nbytes:,} there"
        yield Violation("layout-exchange", what, nbytes=nbytes, where="layout")


def policy(facts: Facts, job: Job) -> Iterator[Violation]:
    """A GPU is shared as the job says, where prefixes run beside decode, and not at all where nothing does."""
    told = facts.plan.summary.policy
    beside = any(not facts.past(at, ROLLOUT_COMPLETE) for at, _ in facts.runs("prefix"))
    kinds = ("none", job.sharing.kind) if beside else ("none",)
    share = job.sharing.share if told.kind == job.sharing.kind else None
    if told.kind not in kinds or (beside and job.schedule in OVERLAPPED and told.kind == "none"):
        yield Violation("asked", f"policy {told.kind}, the job's sharing is {job.sharing.kind}", where="policy")
    elif told.share != share:
        yield Violation("asked", f"share {told.share}, the job's is {share}", where="policy")


def tail(facts: Facts, job: Job) -> Iterator[Violation]:
    """Decode waits for as many prompt groups as the job says, of those that it has sampled."""
    told, kind = facts.plan.summary.tail, job.workload.rollout.kind
    asked = None if kind == "full" else (kind, job.sampled, job.workload.prompts)
    if (told and (told.kind, told.sampled, told.taken)) != asked:
        says = f"{told.taken} of {told.sampled} groups, {told.kind}" if told else "every group"
        what = f"a step takes {says}; the job {job.workload.prompts} of {job.sampled}, {kind}"
        yield Violation("asked", what, where="summary.tail")


def saved_state(facts: Facts, job: Job) -> Iterator[Violation]:
    """What a prefix saves is where the job says, if it says."""
    for o in (o for found in facts.saved.values() for o in found):
        wanted = job.roles[o.role].prefix_saved if o.role in job.roles else "auto"
        wanted = "hbm" if wanted == "group" else wanted
        for window, place in o.residency.items() if wanted != "auto" else ():
            if place not in (wanted, "-"):
                what = f"{o.name} is planned {place}, the job wants it {wanted}"
                yield Violation("asked", what, object=o.name, where=window)


def offloads(facts: Facts, job: Job) -> Iterator[Violation]:
    """Weights and states of a trainer on whole sequences leave HBM where the job lets them."""
    for o in facts.objects.values():
        if o.role not in job.trained or not job.whole_sequences(o.role) or o.process != TIMELINE:
            continue
        trainer, weights = job.trainer(o.role), o.class_ == "regenerable"
        may = trainer.offload_parameters if weights else trainer.offload_optimizer
        if not may and "host" in o.residency.values():
            key = "offload_parameters" if weights else "offload_optimizer"
            yield Violation("asked", f"{o.name} leaves HBM, the job's {key} is false", object=o.name, where=o.name)


def rollout_tower(facts: Facts, job: Job) -> Iterator[Violation]:
    """The rollout engine has a vision tower of its own where it cuts it over its ranks, or shares no weights."""
    rollout, shares = job.roles[job.policy].rollout, any(o.readers for o in facts.objects.values())
    cuts = rollout is not None and rollout.mm_encoder_tp_mode == "weights" and job.rollout_tp > 1
    own = any(o.name.endswith(TOWER) and o.process == "rollout" for o in facts.objects.values())
    if job.spec.vision is not None and own != (cuts or not shares):
        says = "has" if own else "lacks"
        what = f"it {says} a vision tower of its own, the job's mm_encoder_tp_mode is {'weights' if cuts else 'data'}"
        yield Violation("asked", what, where="rollout")


CHECKS: tuple[Callable[[Facts, Job], Iterator[Violation]], ...] = (
    *(capacities, schedule, engines, budgets, lacking, roles, heads, adapters, sent, policy, tail),
    *(saved_state, offloads, rollout_tower, executable),
)


def _refused(plan: Plan) -> Iterator[Violation]:
    try:
        job_of(plan)
    except PlanError as error:
        yield from (Violation("asked", p.what, where=p.where) for p in error.problems)


def check_asked(facts: Facts) -> Iterator[Violation]:
    """Everything in which plan and job differ; a job that would be refused is refused here too."""
    if (job := facts.job) is None:
        yield from _refused(facts.plan)
        return
    for check in CHECKS:
        yield from check(facts, job)
    for others in (*(check_sizes, check_pieces, check_release, check_weight_classes, check_degrees, check_sharing),):
        yield from others(facts, job)
