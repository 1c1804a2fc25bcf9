"""What no backend can execute of a plan: such a plan says so on its first line, and `run` refuses it.

no backend executes it yet: engine megatron; engine vllm; schedule disaggregated
"""

from __future__ import annotations

from collections.abc import Iterator

from rollplex.ir.engines import engine as load_facts
from rollplex.ir.engines import runs
from rollplex.ir.job import Job
from rollplex.ir.loss import split_loss
from rollplex.ir.module import Module
from rollplex.ir.serving import model_length
from rollplex.passes.schedule import Schedule
from rollplex.passes.work import one_copy


def not_executable(module: Module) -> tuple[str, ...]:
    """What no backend can execute yet: the plan is for reading."""
    job = module.job
    engines = {job.trainer(name).engine for name in job.roles}
    engines |= {r.rollout.engine for r in job.roles.values() if r.rollout}
    found = [f"engine {e}" for e in sorted(engines) if not runs(e, job.on_host)]
    found += [f"{role} {what}" for role in job.roles for what in unrun_features(job, role)]
    found += list(_of_ranks(job))
    if job.schedule == "disaggregated":
        found.append("schedule disaggregated")
    found += list(_of_vllm(job))
    if not job.on_host:
        found += list(_of_gpus(job))
    elif not one_copy(job) and any(job.trainer(name).engine != "host" for name in job.trained):
        found.append("a second copy of the weights: only the host trainer's lie as the rollout engine reads them")
    if job.workload.rollout.kind == "partial" and set(module[Schedule].hosts) == module[Schedule].early:
        found.append("partial rollout: no host function sees which responses are complete")
    if job.workload.prompts % job.engines:
        found.append(f"{job.workload.prompts} prompts over {job.engines} rollout engines: each hands over as many")
    if job.workload.turns is not None and engines != {"host"}:
        found.append(f"{job.workload.turn_count} turns: the host engine alone goes on from another turn")
    return (*found, *_of_roles(job), *_of_calls(job, module[Schedule]), *_of_early(module))


def _of_vllm(job: Job) -> Iterator[str]:
    """What vLLM does not do where its job is, or nobody has taught it."""
    rollout = job.roles[job.policy].rollout
    if rollout is None or rollout.engine != "vllm" or not job.on_host:
        return
    heads = load_facts("vllm").cpu_head_dims
    if job.spec.head_dim not in heads:
        yield f"heads of {job.spec.head_dim}: on a CPU vllm has attention for heads of {', '.join(map(str, heads))}"
    if job.model.dtype == "float64":
        yield "model.dtype float64: vllm computes in float32 and less"
    if job.spec.vision is None:
        yield f"{job.spec.name} has no vision tower: on a CPU vllm is bound to Qwen2.5-VL"
    if rollout.mm_encoder_tp_mode == "weights":
        yield "mm_encoder_tp_mode weights: the tower that both engines read is whole"
    if (most := rollout.max_num_batched_tokens) < (length := model_length(job)):
        yield f"max_num_batched_tokens {most}: on a CPU vllm prefills sequences whole, and one has {length} tokens"
    if not one_copy(job):
        yield "a second copy of the weights: vllm reads the trainer's pages"


def _of_gpus(job: Job) -> Iterator[str]:
    """What runs on a host alone so far."""
    if not one_copy(job) and job.schedule != "disaggregated":
        yield "a second copy of the weights on a GPU"
    if job.workload.turns is not None:
        yield f"{job.workload.turn_count} turns on GPUs: attention over several pieces of a boundary runs on a host"


def _of_ranks(job: Job) -> Iterator[str]:
    """Ranks that no backend can be: of the trainers that run, Megatron alone cuts a model."""
    if job.cluster.nodes > 1:
        yield f"{job.cluster.nodes} nodes: all ranks run on one machine"
    trainers = [job.trainer(name) for name in job.roles]
    cut = max((t.tensor_parallel for t in trainers if t.engine == "host"), default=1)
    if cut > 1:
        yield f"tensor_parallel {cut}: the host backend trains whole models"


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


def unrun_features(job: Job, role: str) -> tuple[str, ...]:
    """Features of a role's trainer that no runtime has, or none on GPUs, whatever its engine."""
    section, part = job.trainer(role), job.roles[role]
    degrees = ("pipeline_parallel", "context_parallel", "expert_parallel")
    found = [f"{name} {getattr(section, name)}" for name in degrees if getattr(section, name) > 1]
    switches = {
        "distributed_optimizer": section.distributed_optimizer and not job.on_host,
        "lora": part.lora is not None,
    }
    switches |= {"recompute selective": part.recompute == "selective", "attention unfused": part.attention == "unfused"}
    return (*found, *(name for name, on in switches.items() if on))
