"""A job in words: the three lines on top of every plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollplex.ir.job import Job
    from rollplex.ir.job_schema import Role
    from rollplex.ir.work_schema import Workload


def describe(job: Job) -> str:
    """The job in three aligned lines: model and cluster, roles, work and schedule."""
    reference = [_role(job, name) for name in job.roles if name != job.policy]
    policy = job.roles[job.policy]
    assert policy.train is not None
    assert policy.rollout is not None
    rows = (
        ("model", f"{job.spec.name}, {_parameters(job.spec.parameters)}", "cluster", _cluster(job)),
        (
            "roles",
            f"{job.policy} {_trainer(policy)} -> {_engine(policy.rollout)} x {job.engines}{_shared(job)}",
            *(_first_word("; ".join(reference)) if reference else ("", "")),
        ),
        ("work", _work(job), "schedule", _schedule(job)),
    )
    return "\n".join(f"{a:<10} {b:<47}  {c:<9} {d}".rstrip() for a, b, c, d in rows)


def _role(job: Job, name: str) -> str:
    """`critic Qwen2.5-VL-7B megatron TP4`; the model is named where it is the role's own."""
    own = f"{job.spec_of(name).name} " if job.roles[name].model else ""
    return f"{name} {own}{_engine(job.trainer(name))}"


def _cluster(job: Job) -> str:
    c = job.cluster
    host = f"{c.host_memory_gb / 1000:g} TB" if c.host_memory_gb >= 1000 else f"{c.host_memory_gb:g} GB"
    nodes = f"{c.nodes} node{'s' if c.nodes > 1 else ''}"
    return f"{nodes} x {c.gpus_per_node} {job.device.name}, {host} host"


def _work(job: Job) -> str:
    w = job.workload
    prompts = f"{w.prompts}" if job.sampled == w.prompts else f"{w.prompts} of {job.sampled}"
    each = "responses" if w.turns is None else "trajectories"
    return f"{prompts} prompts x {w.group} {each}, {lengths(w)} tokens"


def lengths(work: Workload) -> str:
    """Budgets of a sequence: `8192 + 2048`, or of three turns `8192 + 3 x 256 + 2 x 1024`."""
    if work.turns is None:
        return f"{work.prompt_tokens} + {work.response_tokens}"
    count, seen = work.turns.count, work.turns.observation_tokens
    return f"{work.prompt_tokens} + {count} x {work.response_tokens} + {count - 1} x {seen}"


def _trainer(role: Role) -> str:
    """`megatron TP8 LoRA 64`, and how adapters are served where the rollout engine does not apply them."""
    if role.lora is None:
        return _engine(role.train)
    return f"{_engine(role.train)} LoRA {role.lora.rank}{' merged' if role.lora.served == 'merged' else ''}"


def _shared(job: Job) -> str:
    return f" (q = {job.q})" if job.shares_weights else ""


def _schedule(job: Job) -> str:
    pools = f", {job.train_gpus} + {job.rollout_gpus} GPUs" if job.disaggregated else ""
    return job.schedule + pools + (f" without {', '.join(job.ablate)}" if job.ablate else "")


def _parameters(count: int) -> str:
    scale, unit = (1e9, "B") if count >= 1e8 else (1e6, "M")
    return f"{count / scale:.2f} {unit} parameters"


def _engine(section: Any) -> str:
    return f"{section.engine} {section.degrees}"


def _first_word(text: str) -> tuple[str, str]:
    first, _, rest = text.partition(" ")
    return first, rest
