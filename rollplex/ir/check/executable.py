"""What a plan must say that no backend executes: `run` and the first line of its page rely on it.

    2 nodes                          the job's cluster          critic is trained beside actor               chunks
    a second copy of the weights     nobody reads the trainer's reference's call %ref_logp is not split      the graph

A reason is known by what stands before its colon. The plan has each as often as it is found here, and no other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from rollplex.ir.check.facts import TIMELINE, Facts
from rollplex.ir.check.rules import Violation
from rollplex.ir.engines import engine, families, runs
from rollplex.ir.job import Job
from rollplex.ir.job_engines import Parallel
from rollplex.ir.plan import NodeRecord, Plan, references
from rollplex.ir.serving import model_length

WHOLE = ("rx.logprobs", "rx.values", "rx.score")
"""Calls that no pass has split."""


def engines(facts: Facts, job: Job) -> Iterator[str]:
    """Engines that nothing runs, and models that those which run do not know."""
    for name in sorted({s.engine for s in _sections(job)}):
        if not runs(name, job.on_host):
            yield f"engine {name}"
    models: dict[str, set[str]] = {}
    for role, part in job.roles.items():
        known = {s.engine: families(s.engine) for s in (part.train, part.score, part.rollout) if s}
        unknown = {e for e, those in known.items() if those is not None and job.spec_of(role).family not in those}
        models.setdefault(job.spec_of(role).name, set()).update(unknown)
    yield from (f"{model} on {' and '.join(sorted(names))}" for model, names in models.items() if names)


def machines(facts: Facts, job: Job) -> Iterator[str]:
    """Ranks on several machines, in pools, or of a rollout that is not dealt out evenly."""
    if job.gpus > job.cluster.gpus_per_node:
        yield f"{job.cluster.nodes} nodes"
    if facts.plan.schedule == "disaggregated":
        yield "schedule disaggregated"
    if job.workload.prompts % job.engines:
        yield f"{job.workload.prompts} prompts over {job.engines} rollout engines"


def cuts(facts: Facts, job: Job) -> Iterator[str]:
    """Degrees in which no trainer cuts a model or its tokens."""
    whole = [job.degrees(role).tp for role in job.roles if job.trainer(role).engine == "host"]
    if max(whole, default=1) > 1:
        yield f"tensor_parallel {max(whole)}"
    for role in job.roles:
        d, heads = job.degrees(role), job.spec_of(role).kv_heads
        named = {"pipeline_parallel": d.pp, "context_parallel": d.cp, "expert_parallel": d.ep}
        yield from (f"{role} {name} {degree}" for name, degree in named.items() if degree > 1)
        if job.trainer(role).engine == "megatron" and d.tp > heads:
            yield f"{role} tensor_parallel {d.tp} over {heads} KV heads"


def features(facts: Facts, job: Job) -> Iterator[str]:
    """Ways to train that are planned alone."""
    for role, part in job.roles.items():
        if job.trainer(role).distributed_optimizer and not job.on_host:
            yield f"{role} distributed_optimizer"
        if role in facts.adapted:
            yield f"{role} lora"
        if part.recompute == "selective":
            yield f"{role} recompute selective"
        if part.attention == "unfused":
            yield f"{role} attention unfused"


def copies(facts: Facts, job: Job) -> Iterator[str]:
    """Weights of the policy that the rollout engine does not read where the trainer has them."""
    shared = any(o.readers for o in facts.objects.values())
    if shared or (facts.plan.schedule == "disaggregated" and not job.on_host):
        return
    if not job.on_host:
        yield "a second copy of the weights on a GPU"
        return
    if any(job.trainer(role).engine != "host" for role in facts.trained):
        yield "a second copy of the weights"
    if _rolls_out(job, "vllm"):
        yield "a second copy of the weights"


def vllm(facts: Facts, job: Job) -> Iterator[str]:
    """What vLLM does not sample with; the rest on a CPU alone."""
    rollout, spec = job.roles[job.policy].rollout, job.spec
    if rollout is None or rollout.engine != "vllm":
        return
    if rollout.mm_encoder_tp_mode == "weights":
        yield "mm_encoder_tp_mode weights"
    if job.on_host and spec.head_dim not in engine("vllm").cpu_head_dims:
        yield f"heads of {spec.head_dim}"
    if job.on_host and job.itemsize > 4:
        yield f"model.dtype {job.model.dtype}"
    if job.on_host and rollout.max_num_batched_tokens < model_length(job):
        yield f"max_num_batched_tokens {rollout.max_num_batched_tokens}"


def roles(facts: Facts, job: Job) -> Iterator[str]:
    """Roles beside the policy: the host engine alone trains several, and has values and models of their own."""
    kind = facts.plan.processes[TIMELINE]
    for role, part in job.roles.items():
        host = job.trainer(role).engine == "host"
        if not host and role in facts.trained and role != job.policy:
            yield f"{role} is trained beside {job.policy}"
        if not host and job.spec_of(role).head == "scalar":
            yield f"{role} ends in one number"
        if not host and part.model:
            yield f"{role} has a model of its own"
        if kind.copies(role) != kind.copies(job.policy):
            yield f"{role} has other data-parallel ranks than {job.policy}"


def calls(facts: Facts, job: Job) -> Iterator[str]:
    """Whole calls of another engine than host, and host functions that do not see which prompts a step takes."""
    for record in facts.plan.graph:
        role = record.args[0] if record.op in WHOLE and record.args else None
        if role in tuple(job.roles) and job.trainer(str(role)).engine != "host":
            yield f"{role}'s call %{record.name} is not split"
    behind = _sampled(facts.plan.graph)
    functions = [r.name for r in facts.plan.graph if r.op == "rx.host"]
    early = [name for name in functions if name not in behind]
    lost = [n for n in early if facts.last_round or (facts.plan.summary.tail and not _chosen_behind(facts.plan, n))]
    yield from (f"host function %{n} runs before it is known which prompts a step takes" for n in lost)
    if job.workload.rollout.kind == "partial" and early == functions:
        yield "partial rollout"


def turns(facts: Facts, job: Job) -> Iterator[str]:
    """Trajectories of several turns are for the host engine on a host."""
    if facts.turns > 1 and not job.on_host:
        yield f"{facts.turns} turns on GPUs"
    if facts.turns > 1 and {s.engine for s in _sections(job)} != {"host"}:
        yield f"{facts.turns} turns"


def _sections(job: Job) -> list[Parallel]:
    return [s for role in job.roles.values() for s in (role.train, role.score, role.rollout) if s]


def _rolls_out(job: Job, name: str) -> bool:
    rollout = job.roles[job.policy].rollout
    return rollout is not None and rollout.engine == name


def _chosen_behind(plan: Plan, name: str) -> bool:
    """Whether an early host function gives numbers a prompt, which a step can choose among where it reads them.

    A divisor made of such numbers alone is computed before anybody knows the prompts that are taken.
    """
    record = next(r for r in plan.graph if r.name == name)
    responses = {r.name for r in plan.graph if r.op == "rx.generate"}
    alone = (loss for loss in plan.losses.values() if not responses.intersection(loss.divisor_inputs))
    return record.kwargs.get("returns", "scores") == "scores" and not any(name in d.divisor_inputs for d in alone)


def _sampled(graph: tuple[NodeRecord, ...]) -> set[str]:
    """Records that are made of responses."""
    found: set[str] = set()
    for record in graph:
        if record.op == "rx.generate" or found.intersection(references([record.args, record.kwargs])):
            found.add(record.name)
    return found


RULES: tuple[Callable[[Facts, Job], Iterator[str]], ...] = (
    *(engines, machines, cuts, features, copies, vllm, roles, calls, turns),
)


def executable(facts: Facts, job: Job) -> Iterator[Violation]:
    """The plan says all that no backend executes of it, and nothing else."""
    told = Counter(_known_by(reason) for reason in facts.plan.not_executable)
    found = Counter(_known_by(what) for rule in RULES for what in rule(facts, job))
    for what in found - told:
        yield Violation("asked", f"no backend executes it, and not_executable leaves out why: {what}")
    for what in told - found:
        yield Violation("asked", f"not_executable has `{what}`, for which plan and job have no ground")


def _known_by(reason: str) -> str:
    return reason.partition(":")[0]
