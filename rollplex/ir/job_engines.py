"""The engine sections of a role: what trains, what scores, what rolls out, and how each cuts the model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rollplex.ir.job_section import AutoOrCount, Count, Section, Share
from rollplex.ir.shards import Degrees
from rollplex.ir.sizes import Gib

DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "expert_parallel")
"""Keys of an engine that a job file may leave to the compiler, as `auto`: it then stands for several jobs."""


class Parallel(Section):
    """What any engine states: its name and how many GPUs hold one copy of the model."""

    engine: str
    tensor_parallel: Count = Field(default=1, description="GPUs that every tensor is cut over; auto: the best")

    @property
    def degrees(self) -> str:
        """`TP8 PP2`: how the model is cut."""
        return f"TP{self.tensor_parallel}"


class Train(Parallel):
    """The training engine of a role."""

    engine: str = Field(default="megatron", description="megatron, host, or one that a package adds")
    sequence_parallel: bool = Field(default=True, description="cut activations between the tensor-parallel regions too")
    data_parallel: Count | None = Field(
        default=None, description="copies of the model; null derives GPUs / (tensor x pipeline x context parallel)"
    )
    pipeline_parallel: Count = Field(
        default=1, description="stages that the layers are dealt out to; must divide them, or what two keys leave"
    )
    num_layers_in_first_pipeline_stage: Count | None = Field(
        default=None, description="megatron: layers beside embedding and vision tower; null is as many as elsewhere"
    )
    num_layers_in_last_pipeline_stage: Count | None = Field(
        default=None, description="megatron: layers beside the head; null is as many as elsewhere"
    )
    context_parallel: Count = Field(default=1, description="ranks that one sequence's tokens are dealt out to")
    expert_parallel: Count = Field(
        default=1, description="ranks that the experts are dealt out to, among the data x context parallel ones"
    )
    distributed_optimizer: bool = Field(
        default=False,
        description="megatron, host: cut master weights and moments over the data x context parallel ranks",
    )
    zero: Annotated[int, Field(ge=0, le=3)] | None = Field(
        default=None,
        description="fsdp: cut over the data-parallel ranks are optimizer states (1), gradients too (2), weights too "
        "(3, FSDP's full shard); null is 3",
    )
    microbatch: AutoOrCount = Field(
        default=1,
        description="fsdp: whole sequences that are trained or scored at a time; auto: the most of a group that fit",
    )
    offload_parameters: bool = Field(default=False, description="fsdp: weights may wait in host memory")
    offload_optimizer: bool = Field(default=False, description="fsdp: gradients and moments may wait in host memory")
    make_vocab_size_divisible_by: Count | None = Field(
        default=None,
        description="megatron: rows of embedding and head are a multiple of this x tensor_parallel; null takes vLLM's",
    )

    @property
    def gpus_a_copy(self) -> int:
        """GPUs that hold one copy of the model."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel

    @property
    def degrees(self) -> str:
        """`TP8 PP2`: how the model and its tokens are cut."""
        return str(self.cut())

    def cut(self, data_parallel: int = 1) -> Degrees:
        """The same with the layers of the first and the last stage, and how often the model is repeated."""
        return Degrees(
            tp=self.tensor_parallel, pp=self.pipeline_parallel, cp=self.context_parallel, ep=self.expert_parallel,
            dp=data_parallel, first=self.num_layers_in_first_pipeline_stage,
            last=self.num_layers_in_last_pipeline_stage,
        )  # fmt: skip


class Score(Train):
    """The engine that computes a role's log-probabilities without training it."""


class Rollout(Parallel):
    """The engine that samples a role's responses."""

    engine: str = Field(default="vllm", description="vllm, host, or one that a package adds")
    kv_cache_gib: Gib | None = Field(
        default=None,
        examples=[29],
        description='KV cache budget of one GPU, GiB or with a unit: "48 MiB"; this or gpu_memory_utilization',
    )
    gpu_memory_utilization: Share | None = Field(
        default=None,
        description="vllm: share of the GPU's total memory for the whole engine; KV gets what weights, the profiled "
        "peak and the context leave of it",
    )
    runtime_gib: Gib | None = Field(
        default=None,
        description="buffers of the engine beside weights and KV, one GPU, GiB or with a unit; null is 3, or under "
        "gpu_memory_utilization the peak that the engine would profile",
    )
    max_model_len: Count | None = Field(
        default=None, description="most tokens of a prompt and its response; null is the sum of their budgets"
    )
    max_num_batched_tokens: Count = Field(default=8192, description="most tokens that the engine runs at a time")
    max_num_seqs: Count = Field(default=256, description="most sequences that decode at a time")
    mm_encoder_tp_mode: Literal["data", "weights"] = Field(
        default="data", description="the vision tower whole on every rank, or cut over the tensor-parallel ranks"
    )
