"""What no backend can execute of a plan: such a plan says so on its first line, and `run` refuses it.

no backend executes it yet: engine fsdp; 2 nodes: all ranks run on one machine; schedule disaggregated

What stands before a reason's colon is what the checker asks for (ir/check/executable.py), from plan and job.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.engines import engine as load_facts
from rollplex.ir.engines import families, runs
from rollplex.ir.job import Job
from rollplex.ir.job_engines import Rollout
from rollplex.ir.loss import split_loss
from rollplex.ir.module import Module
from rollplex.ir.serving import model_length
from rollplex.passes.schedule import Schedule
from rollplex.passes.work import one_copy


def not_executable(module: Module) -> tuple[str, ...]:
    """What no backend can execute yet: the plan is for reading."""
    job, schedule = module.job, module[Schedule]
    return (
        *_of_engines(job), *_of_models(job), *_of_features(job), *_of_ranks(job), *_of_vllm(job), *_of_copies(job),
        *_of_tails(job, schedule), *_of_turns(job), *_of_roles(job), *_of_calls(job, schedule), *_of_early(module),
    )  # fmt: skip


def _engines(job: Job) -> set[str]:
    rollouts = (role.rollout for role in job.roles.values() if role.rollout)
    return {job.trainer(name).engine for name in job.roles} | {r.engine for r in rollouts}


def _of_engines(job: Job) -> Iterator[str]:
    """Engines that are planned with alone."""
    for name in sorted(_engines(job)):
        if not runs(name, job.on_host):
            yield f"engine {name}"


def _of_models(job: Job) -> Iterator[str]:
    """Models that engines which run do not know."""
    unknown: dict[str, set[str]] = {}
    for name, role in job.roles.items():
        spec, used = job.spec_of(name), {job.trainer(name).engine}
        for one in used | ({role.rollout.engine} if role.rollout else set()):
            if (known := families(one)) is not None and spec.family not in known:
                unknown.setdefault(spec.name, set()).add(one)
    for model, names in unknown.items():
        yield f"{model} on {' and '.join(sorted(names))}: Qwen2.5-VL alone runs there"


def _of_features(job: Job) -> Iterator[str]:
    """Features of a role's trainer that no runtime has, or none on GPUs, whatever its engine."""
    for role, part in job.roles.items():
        section = job.trainer(role)
        for degree in ("pipeline_parallel", "context_parallel", "expert_parallel"):
            if (ways := getattr(section, degree)) > 1:
                yield f"{role} {degree} {ways}"
        if section.distributed_optimizer and not job.on_host:
            yield f"{role} distributed_optimizer"
        if part.lora is not None:
            yield f"{role} lora"
        if part.recompute == "selective":
            yield f"{role} recompute selective"
        if part.attention == "unfused":
            yield f"{role} attention unfused"


def _of_ranks(job: Job) -> Iterator[str]:
    """Ranks that no backend can be: of the trainers that run, Megatron alone cuts a model."""
    if job.cluster.nodes > 1:
        yield f"{job.cluster.nodes} nodes: all ranks run on one machine"
    trainers = {name: job.trainer(name) for name in job.roles}
    cut = max((t.tensor_parallel for t in trainers.values() if t.engine == "host"), default=1)
    if cut > 1:
        yield f"tensor_parallel {cut}: the host backend trains whole models"
    for name in (n for n, t in trainers.items() if t.engine == "megatron"):
        if (tp := trainers[name].tensor_parallel) > (heads := job.spec_of(name).kv_heads):
            yield f"{name} tensor_parallel {tp} over {heads} KV heads: megatron repeats none"
    if job.schedule == "disaggregated":
        yield "schedule disaggregated"


def _of_vllm(job: Job) -> Iterator[str]:
    """What vLLM does not do where its job is, or nobody has taught it."""
    rollout = job.roles[job.policy].rollout
    if rollout is None or rollout.engine != "vllm":
        return
    if rollout.mm_encoder_tp_mode == "weights":
        yield "mm_encoder_tp_mode weights: the tower that both engines read is whole"
    if job.on_host:
        yield from _of_vllm_on_cpu(job, rollout)


def _of_vllm_on_cpu(job: Job, rollout: Rollout) -> Iterator[str]:
    heads = load_facts("vllm").cpu_head_dims
    if job.spec.head_dim not in heads:
        yield f"heads of {job.spec.head_dim}: on a CPU vllm has attention for heads of {', '.join(map(str, heads))}"
    if job.model.dtype == "float64":
        yield "model.dtype float64: vllm computes in float32 and less"
    if (most := rollout.max_num_batched_tokens) < (length := model_length(job)):
        yield f"max_num_batched_tokens {most}: on a CPU vllm prefills sequences whole, and one has {length} tokens"
    if not one_copy(job):
        yield "a second copy of the weights: vllm reads the trainer's pages"


def _of_copies(job: Job) -> Iterator[str]:
    """A second copy of the weights, where no trainer writes over it."""
    if one_copy(job):
        return
    if job.on_host and any(job.trainer(name).engine != "host" for name in job.trained):
        yield "a second copy of the weights: only the host trainer's lie as the rollout engine reads them"
    if not job.on_host and job.schedule != "disaggregated":
        yield "a second copy of the weights on a GPU"


def _of_tails(job: Job, schedule: Schedule) -> Iterator[str]:
    """Rollouts of which a step takes some, where nobody would see which."""
    if job.workload.rollout.kind == "partial" and set(schedule.hosts) == schedule.early:
        yield "partial rollout: no host function sees which responses are complete"
    if job.workload.prompts % job.engines:
        yield f"{job.workload.prompts} prompts over {job.engines} rollout engines: each hands over as many"


def _of_turns(job: Job) -> Iterator[str]:
    """Several turns beside anything but the host engine on a host."""
    if job.workload.turns is None:
        return
    if not job.on_host:
        yield f"{job.workload.turn_count} turns on GPUs: attention over several pieces of a boundary runs on a host"
    if _engines(job) != {"host"}:
        yield f"{job.workload.turn_count} turns: the host engine alone goes on from another turn"


def _of_roles(job: Job) -> Iterator[str]:
    """Roles that a backend cannot have beside the policy."""
    for name in job.roles:
        if job.trainer(name).engine != "host":
            yield from _of_other_engines(job, name)
        if job.data_parallel(name) != job.data_parallel(job.policy):
            yield f"{name} has other data-parallel ranks than {job.policy}: backends do not pass values between them"


def _of_other_engines(job: Job, name: str) -> Iterator[str]:
    """What the host engine alone does with a role."""
    engine, role = job.trainer(name).engine, job.roles[name]
    if name in job.trained[1:]:
        yield f"{name} is trained beside {job.policy}: {engine} trains one role"
    if role.head == "scalar":
        yield f"{name} ends in one number: {engine} runs models that end in logits"
    if role.model:
        yield f"{name} has a model of its own: {engine} loads the job's"


def _of_calls(job: Job, schedule: Schedule) -> Iterator[str]:
    """Calls that are not split, and host functions that would be told of prompts that no step takes."""
    for call in (c for c in schedule.calls if c.op == "whole"):
        if (engine := job.trainer(call.role).engine) != "host":
            yield f"{call.role}'s call %{call.node} is not split: {engine} goes on from a prefix"


def _of_early(module: Module) -> Iterator[str]:
    """Host functions before the rollout, of prompts among which a step chooses: numbers behind it can be chosen too."""
    job, schedule, graph = module.job, module[Schedule], module.graph
    again, some = len(job.sampled_per_engine) > 1, job.workload.rollout.kind != "full"
    sampled = {call.node for call in schedule.generates}
    divisors = [set(split_loss(graph, role).divisor_inputs) for role in job.trained]
    for node in (n for n in graph.nodes if n.name in schedule.early):
        alone = any(node.name in made_of and not made_of & sampled for made_of in divisors)
        if again or (some and (alone or node.kwargs.get("returns", "scores") != "scores")):
            yield f"host function %{node.name} runs before it is known which prompts a step takes"
