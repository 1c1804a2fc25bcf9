"""Tiny jobs of every algorithm of examples/ on the host engine, run in threads, with what a test compares."""

from __future__ import annotations

from functools import cache
from typing import Any

from capacities import smallest
from runtime_threads import TRAIN, InThreads
from runtime_tiny import CONFIG, SHORT, luck, tiny_job
from textbook import LOSSES, Textbook, Whole
from torch import Tensor

from rollplex.backends.data.histories import Histories
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.training.placement import config_of, views
from rollplex.ir.job import Job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.ir.spec import Part
from rollplex.ir.steps import Run
from rollplex.passes.pipeline import compile_plan

HOST: dict[str, Any] = {"train": {"engine": "host"}}
ROLLOUT_OF = {"rollout": {"engine": "host", "kv_cache_gib": "512 KiB", "runtime_gib": "256 KiB"}}
ACTOR: dict[str, Any] = {"actor": {**HOST, **ROLLOUT_OF}}
REFERENCE: dict[str, Any] = {"reference": {"score": {"engine": "host"}}}
SMALLER: dict[str, Any] = {**CONFIG, "num_hidden_layers": 1, "intermediate_size": 40}
"""A model of a role's own: what it reads is what the policy reads."""
JUDGE: dict[str, Any] = {"judge": {"score": {"engine": "host"}, "model": {"name": "smaller", "config": SMALLER}}}
ROLES: dict[str, dict[str, Any]] = {
    "grpo": {**ACTOR, **REFERENCE},
    "gspo": ACTOR,
    "rloo": {**ACTOR, **REFERENCE},
    "reinforce_pp": {**ACTOR, **REFERENCE},
    "dapo": ACTOR,
    "grpo_reward_model": {**ACTOR, **REFERENCE, **JUDGE},
    "embodied": {**ACTOR, **REFERENCE},
    "ppo": {**ACTOR, **REFERENCE, "critic": HOST},
}
WORKLOAD = {"group": 3, "response_tokens": 10}
OPTIMIZER = {"lr": 1e-2, "eps": 1e-4, "weight_decay": 0.1, "clip_norm": 0.5}
TURNS = {"count": 3, "observation_tokens": 36}
ENDS = tuple(range(0, 264, 7))
"""Tokens that end a response here: one in seven, so that lengths differ."""


def job_of(name: str, **changes: Any) -> Job:
    """The job of an example: float64, two groups of three responses of up to ten tokens."""
    base: dict[str, Any] = {
        "model": {"dtype": "float64"},
        "cluster": {"capacity_gib": "64 MiB"},
        "workload": WORKLOAD,
        "optimizer": OPTIMIZER,
        **({"workload": {**WORKLOAD, "turns": TURNS}} if name == "embodied" else {}),
        "algorithm": {"longest": 10, "cache": 4} if name == "dapo" else {},  # quarters are exact in any dtype
    }
    for key, value in changes.items():
        base[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    roles = base.pop("roles", ROLES[name])
    return Job.model_validate({**tiny_job(**base).model_dump(), "roles": roles})


@cache
def _compiled(name: str, text: str) -> Plan:
    return compile_plan(load_algorithm(f"examples/{name}.py"), Job.model_validate_json(text))


def plan_of(name: str, **changes: Any) -> Plan:
    return _compiled(name, job_of(name, **changes).model_dump_json())


@cache
def tight_plan_of(name: str) -> Plan:
    """The plan for the smallest device that the job fits on."""
    return smallest(load_algorithm(f"examples/{name}.py"), lambda c: job_of(name, cluster={"capacity_gib": c}), 1500)


def in_pieces(plan: Plan) -> dict[str, int]:
    """The pieces in which gradients leave, by role."""
    return {s.role: len(s.offloads) for s in plan.programs["train"] if isinstance(s, Run) and s.offloads}


def leaving_plan_of(name: str, **changes: Any) -> Plan:
    """The plan for the smallest device on which gradients of all trained roles leave in pieces, and groups are whole.

    A group that is trained on in parts has other bits. Prompts are short, and decode beside a backward has little room.
    """
    rollout = {**ROLLOUT_OF["rollout"], "kv_cache_gib": "192 KiB", "runtime_gib": "128 KiB"}
    roles = {**ROLES[name], "actor": {**HOST, "rollout": rollout}}

    def job_at(capacity: str) -> Job:
        return job_of(name, cluster={"capacity_gib": capacity}, workload=SHORT, roles=roles, **changes)

    def leaves(plan: Plan) -> bool:
        return set(in_pieces(plan)) == set(plan.losses) and plan.summary.chunks.microbatch.suffix_responses == 3

    return smallest(load_algorithm(f"examples/{name}.py"), job_at, 1500, leaves)


def environment(tokens: list[int], turn: int, index: int) -> str:
    """What is seen after a response: of another length for almost every one."""
    return "s" * (sum(tokens) % 5) + f"{turn}{index}"


HOSTS = {"reward": luck, "environment": environment}


class Watched:
    """A run in threads: after `step`, `prompts`, `rollouts` and `histories` are those of the step; it checks bytes."""

    def __init__(self, plan: Plan, ends: tuple[int, ...] | None = ENDS) -> None:
        self.run = InThreads(plan, {name: HOSTS[name] for name in plan.hosts.values()})
        self.run.feed._eos = self.run.feed._eos if ends is None else ends
        self.prompts: Any = None
        self.rollouts: list[Rollout] = []
        self.histories: list[Any] = []

    def step(self, iteration: int) -> None:
        self.run.step(iteration)
        values = self.run.states[TRAIN].values
        self.prompts = values["prompts"]
        self.rollouts = [value for value in values.values() if isinstance(value, Rollout)]
        self.histories = [value for value in values.values() if isinstance(value, Histories)]

    def textbook(self, name: str) -> Textbook:
        """A trainer that begins with the weights that this run has now."""
        roles = {role: Whole(config_of(self.run.job, role), self.weights(role)) for role in self.run.job.roles}
        return Textbook(self.run.job, roles, LOSSES[name.removesuffix("_reward_model")])

    def weights(self, role: str) -> dict[str, Tensor]:
        """All weights of a role, from wherever the plan has them now."""
        train = self.run.train
        objects = train._replicas[role].objects
        parts: dict[Part, Tensor] = {p: train.objects.current(o, train.dtype) for p, o in objects.items()}
        return {n: w.clone() for n, w in views(parts, self.run.job, role).items()}

    def loss(self, role: str) -> float:
        return self.run.train._losses[role].total

    def norm(self, role: str) -> float:
        update = self.run.states[TRAIN].updates[role]
        return update.metrics[f"{update.trained.label}grad_norm"]

    def digests(self) -> dict[str, str]:
        """Of all training state and of what was sampled."""
        found = self.run.train.digests() | self.run.rollout.digests()
        for update in self.run.states[TRAIN].updates.values():
            found |= update.digests()
        return found
