"""A job: the model, the cluster, the roles and the work of a step, as the YAML file and the overrides state them.

job = load_job("examples/jobs/qwen2_5_vl_32b_h800x8.yaml", overrides=["schedule=naive"])
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, model_validator

from rollplex.ir.engines import is_so
from rollplex.ir.errors import JobError
from rollplex.ir.hardware import Gpu, load_gpu
from rollplex.ir.job_checks import job_notes
from rollplex.ir.job_schema import (
    OVERLAPPED,
    Ablation,
    Cluster,
    Layout,
    ModelChoice,
    Optimizer,
    Plain,
    Role,
    RoleModel,
    RunOptions,
    Schedule,
    Section,
    Sharing,
    Solver,
    Train,
    _distinct,
    named_model,
)
from rollplex.ir.job_text import describe
from rollplex.ir.lora import merges
from rollplex.ir.models import ModelSpec, config_file, load_model, model_label, spec_from_config
from rollplex.ir.serving import kv_cache_bytes, kv_need_bytes, runtime_bytes
from rollplex.ir.shards import Degrees
from rollplex.ir.sizes import gb_to_nbytes, gib_to_nbytes
from rollplex.ir.work_schema import Workload

ITEMSIZE = {"bfloat16": 2, "float32": 4, "float64": 8}
ROUNDING = 1e-9
"""32 / 0.8 prompts are 40, not 41."""
TRAINING, ROLLOUT, EVERY = "training", "rollout", "gpus"
"""Pools: two under schedule disaggregated, else one of all GPUs."""


class Job(Section):
    """Everything a plan depends on beside the algorithm."""

    model: ModelChoice = Field(description="the model; a name alone is short for {name: ..}")
    cluster: Cluster = Field(description="the machines")
    roles: dict[str, Role] = Field(min_length=1, description="the algorithm's roles by their parameter names")
    workload: Workload = Field(description="one step's work")
    schedule: Schedule = Field(default="rollplex", description="how phases and GPUs are arranged")
    ablate: Annotated[tuple[Ablation, ...], AfterValidator(_distinct)] = Field(
        default=(), description="mechanisms switched off, to see what they are worth"
    )
    layout: Layout = Field(default_factory=Layout, description="weight layout")
    optimizer: Optimizer = Field(default_factory=Optimizer, description="the update")
    sharing: Sharing = Field(default_factory=Sharing, description="how prefix work and decode share a GPU")
    solver: Solver = Field(default_factory=Solver, description="limits of the solver passes")
    algorithm: dict[str, Plain] = Field(
        default_factory=dict, description="values for the algorithm's keyword parameters (clip, kl, ..)"
    )
    run: RunOptions = Field(default_factory=RunOptions, description="what `rollplex run` needs")

    @model_validator(mode="before")
    @classmethod
    def _model_by_name(cls, data: Any) -> Any:
        return named_model(data)

    # ---- the model and the device

    @cached_property
    def spec(self) -> ModelSpec:
        """The model's dimensions; host engines keep the vocabulary as it is, the others pad it to 64."""
        return self.load(self.model)

    def spec_of(self, role: str) -> ModelSpec:
        """The dimensions of a role's model: its own or the job's, with logits or one number at its end."""
        return self._specs[role]

    @cached_property
    def _specs(self) -> dict[str, ModelSpec]:
        own = {name: self.load(role.model) if role.model else self.spec for name, role in self.roles.items()}
        scalar = {name for name, role in self.roles.items() if role.head == "scalar"}
        return {name: replace(spec, head="scalar") if name in scalar else spec for name, spec in own.items()}

    def load(self, model: ModelChoice | RoleModel) -> ModelSpec:
        """The dimensions of a model that the job names."""
        path = Path(model.name)
        if model.config is None:
            spec = load_model(model.name)
        else:
            where = config_file(path) if os.path.exists(path) else "model.config"
            spec = spec_from_config(model.config, model_label(path), where)
        return replace(spec, vocab_multiple=1) if self.on_host else spec

    @cached_property
    def device(self) -> Gpu:
        """The GPU type, with the host link that was measured."""
        gpu, measured = load_gpu(self.cluster.gpu), self.cluster.calibration
        return replace(gpu, measured_link_gb_s=measured.link.both_gb_s) if measured else gpu

    @property
    def on_host(self) -> bool:
        """Whether the engines are CPU processes."""
        return self.cluster.gpu.lower() == "cpu"

    @property
    def itemsize(self) -> int:
        """Bytes of one element of the model's dtype."""
        return ITEMSIZE[self.model.dtype]

    # ---- capacities

    @property
    def gpus(self) -> int:
        """GPUs of the cluster."""
        return self.cluster.gpus_per_node * self.cluster.nodes

    # ---- pools

    @property
    def disaggregated(self) -> bool:
        """Whether rollout has GPUs of its own."""
        return self.schedule == "disaggregated"

    @property
    def rollout_gpus(self) -> int:
        """GPUs that roll out: those of the rollout pool, or all."""
        return (self.cluster.rollout_gpus or 0) if self.disaggregated else self.gpus

    @property
    def train_gpus(self) -> int:
        """GPUs that train and score: those of the training pool, or all."""
        return self.gpus - self.rollout_gpus if self.disaggregated else self.gpus

    @property
    def pools(self) -> dict[str, int]:
        """GPU pools by name, and their GPUs; one pool where the engines share all of them."""
        if self.disaggregated:
            return {TRAINING: self.train_gpus, ROLLOUT: self.rollout_gpus}
        return {EVERY: self.gpus}

    def pool(self, process: str) -> str:
        """The pool that a kind of engine process runs on."""
        if self.disaggregated:
            return ROLLOUT if process == "rollout" else TRAINING
        return EVERY

    @property
    def pools_share_a_node(self) -> bool:
        """Whether some node has GPUs of both pools, so that new weights need not cross the network."""
        return self.disaggregated and self.rollout_gpus < self.cluster.gpus_per_node

    @property
    def capacity_bytes(self) -> int:
        """Bytes of one GPU that a plan may use."""
        if self.cluster.capacity_gib is not None:
            return gib_to_nbytes(self.cluster.capacity_gib)
        return self.device.usable_bytes

    @property
    def host_memory_bytes(self) -> int:
        """Host memory of one node."""
        return gb_to_nbytes(self.cluster.host_memory_gb)

    @property
    def host_pool_bytes(self) -> int:
        """Host memory of one node that may be pinned for the pool."""
        return int(self.host_memory_bytes * self.cluster.pinned_share)

    # ---- roles and degrees

    @property
    def policy(self) -> str:
        """The role that is trained and sampled from."""
        names = [name for name, role in self.roles.items() if role.train and role.rollout]
        if not names:
            raise JobError("no role has both `train` and `rollout`", hint="give the policy's role both sections")
        return names[0]

    @property
    def trained(self) -> tuple[str, ...]:
        """Every role that is trained, the policy first."""
        return (self.policy, *(name for name, role in self.roles.items() if role.train and name != self.policy))

    def trainer(self, role: str) -> Train:
        """The section of the engine that trains or scores a role: both run in the training-rank processes."""
        section = self.roles[role].train or self.roles[role].score
        if section is None:
            raise JobError(f"role `{role}` has neither `train` nor `score`")
        return section

    def data_parallel(self, role: str) -> int:
        """Copies of the role's model in its training or scoring engine."""
        return self.train_gpus // self.trainer(role).gpus_a_copy

    def degrees(self, role: str) -> Degrees:
        """How the training or scoring engine of a role cuts the model and its tokens, and repeats them."""
        return self.trainer(role).cut(self.data_parallel(role))

    @property
    def train_tp(self) -> int:
        """Tensor-parallel degree of the policy's training engine."""
        return self.trainer(self.policy).tensor_parallel

    @property
    def rollout_tp(self) -> int:
        """Tensor-parallel degree of the policy's rollout engine."""
        rollout = self.roles[self.policy].rollout
        assert rollout is not None
        return rollout.tensor_parallel

    @property
    def q(self) -> int:
        """Training ranks that share one rollout shard: TP of training over TP of rollout; 0 where none is shared."""
        return self.train_tp // self.rollout_tp if self.shares_weights else 0

    @property
    def shares_weights(self) -> bool:
        """Whether the rollout engine reads the weights that the policy's trainer updates."""
        return not (self.disaggregated or self.whole_sequences(self.policy) or merges(self))

    def whole_sequences(self, role: str) -> bool:
        """Whether a role's engine runs every response with its prompt before it."""
        return is_so(self.trainer(role).engine, "whole_sequences")

    def zero(self, role: str) -> int:
        """ZeRO stage of a role's engine: what it cuts over the ranks that would repeat it."""
        stated = self.trainer(role).zero
        return stated if stated is not None else 3 if self.whole_sequences(role) else 0

    def cuts_optimizer(self, role: str) -> bool:
        """Whether every replica updates a share of the parameters."""
        return self.trainer(role).distributed_optimizer or self.zero(role) > 0

    @property
    def stages(self) -> int:
        """Pipeline stages of the policy's trainer: a rollout shard gathers the layers of all of them."""
        return self.trainer(self.policy).pipeline_parallel

    @property
    def engines(self) -> int:
        """Rollout engines."""
        return self.rollout_gpus // self.rollout_tp

    # ---- work

    @property
    def group(self) -> int:
        """Responses of one prompt."""
        return self.workload.group

    @property
    def prompts_per_rank(self) -> int:
        """Prompts of one step that each training rank of the policy works on."""
        return self.prompts_of(self.policy)

    def prompts_of(self, role: str) -> int:
        """Prompts of one step that each rank of a role's training or scoring engine works on, at most."""
        return -(-self.workload.prompts // self.data_parallel(role))

    @property
    def overlapped(self) -> bool:
        """Whether prefixes run beside the decode of the same GPUs."""
        return self.schedule in OVERLAPPED

    @property
    def sampled(self) -> int:
        """Prompts that the engines work on in a step, of which it takes `workload.prompts`."""
        tail = self.workload.rollout
        if tail.kind == "partial":
            return math.ceil(self.workload.prompts / (tail.share or 1.0) - ROUNDING)
        if tail.kind == "oversample":
            return math.ceil(self.workload.prompts * (tail.factor or 1.0) - ROUNDING)
        return self.workload.prompts

    def prefixes_of(self, role: str) -> int:
        """Prompts whose prefix a rank computes: all that a step may take, where it is not known yet which."""
        return -(-self.sampled // self.data_parallel(role)) if self.overlapped else self.prompts_of(role)

    def with_group(self, role: str) -> bool:
        """Whether the prefix of a trained role runs with its group, right before the group's train step."""
        return self.roles[role].prefix_saved == "group"

    def boundaries_of(self, role: str) -> int:
        """Prompts whose boundary a rank has at a time: of all prefixes, or of the group that it works on."""
        return 1 if self.with_group(role) else self.prefixes_of(role)

    @property
    def prompts_per_engine(self) -> int:
        """Prompts of one step that each rollout engine samples for, at most."""
        return -(-self.sampled // self.engines)

    @property
    def sampled_per_engine(self) -> tuple[int, ...]:
        """Prompts that each engine is expected to sample for, round by round: all, then those that taught nothing."""
        again = self.workload.dynamic_sampling
        if again is None:
            return (self.prompts_per_engine,)
        left = ((1 - again.kept) ** r for r in range(again.rounds))
        return tuple(math.ceil(round(self.prompts_per_engine * share, 9)) for share in left)

    @property
    def rollout_kv_need_bytes(self) -> int:
        """KV bytes of one rollout rank when every prompt and response fills its budget and none is preempted."""
        return kv_need_bytes(self)

    @property
    def kv_cache_bytes(self) -> int:
        """KV cache of one rollout rank: stated, or what vLLM's share of the memory leaves."""
        return kv_cache_bytes(self)

    @property
    def runtime_bytes(self) -> int:
        """Buffers of one rollout rank beside weights and KV."""
        return runtime_bytes(self)

    # ---- printing

    def notes(self) -> tuple[str, ...]:
        """What the user should know about a job that is in order."""
        return job_notes(self)

    def describe(self) -> str:
        """The job in three aligned lines: model and cluster, roles, work and schedule."""
        return describe(self)


def load_job(path: str | Path, overrides: Iterable[str] = ()) -> Job:
    """The job in a YAML file with `a.b=c` overrides applied; JobError reports every problem at once, with its line.

    A file that leaves degrees to the compiler (`auto`) is several jobs: `rollplex.ir.job_auto.load_jobs`.
    """
    from rollplex.ir.job_auto import load_jobs  # it needs Job

    return load_jobs(path, overrides).only(str(path))
