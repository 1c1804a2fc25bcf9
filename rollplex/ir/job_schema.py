"""The sections of a job: what each key means, its unit, its default and its range."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rollplex.ir.calibration import Calibration
from rollplex.ir.hardware import COMMUNICATOR_MIB, CONTEXT_MIB, FIRST_COMMUNICATOR_MIB, PROCESS_HOST_MIB
from rollplex.ir.job_engines import Parallel, Rollout, Score, Train
from rollplex.ir.job_section import AutoOrCount, Count, NonNegative, NonNegativeCount, Positive, Section, Share
from rollplex.ir.sizes import Gb, Gib

__all__ = ["Parallel", "Rollout", "Score", "Section", "Train"]

DType = Literal["bfloat16", "float32", "float64"]
Schedule = Literal["serial", "rollplex", "streamed", "naive", "disaggregated"]
OVERLAPPED = ("rollplex", "streamed", "naive")
"""Schedules whose prefixes run beside the decode of the same GPUs."""
Ablation = Literal["state_offload", "rollout_release", "chunked_optimizer", "weight_sharing"]
Part = Literal["vision", "language"]
Recompute = Literal["none", "selective", "full"]
LayoutOrder = Literal["stock", "reindex", "auto"]
SnapshotPages = Literal["auto", "keep", "release"]
Target = Literal["qkv", "o", "gate_up", "down"]


def _distinct(values: tuple) -> tuple:
    repeated = sorted({str(v) for v in values if values.count(v) > 1})
    if repeated:
        raise ValueError(f"{', '.join(repeated)} stands there more than once")
    return values


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"is {value!r}; expected a number, a text, true, false or null")


Plain = Annotated[bool | int | float | str | None, BeforeValidator(_plain)]


def named_model(data: Any) -> Any:
    """A section in which `model: NAME` is written out as {name: NAME}."""
    if isinstance(data, dict) and isinstance(data.get("model"), str):
        return {**data, "model": {"name": data["model"]}}
    return data


def frozen_tower(data: Any) -> Any:
    """A role with adapters whose `freeze` names the vision tower: they are the language model's."""
    if not isinstance(data, dict) or not data.get("lora"):
        return data
    freeze = data.get("freeze", ())
    known = isinstance(freeze, list | tuple) and "vision" not in freeze
    return {**data, "freeze": ("vision", *freeze)} if known else data


class ModelChoice(Section):
    """Which model is trained, and in which dtype the engines hold it."""

    name: str = Field(
        examples=["Qwen2.5-VL-32B"],
        min_length=1,
        description="a registry name, a Hugging Face directory, or a config.json",
    )
    dtype: DType = Field(
        default="bfloat16", description="of weights, activations and KV; float32 and float64 on the host"
    )
    config: dict[str, Any] | None = Field(
        default=None,
        description="config.json fields; filled in when `name` is a path, so that a plan stands on its own",
    )


class RoleModel(Section):
    """A role's own model, of another size or trained for something else than the job's; in the job's dtype."""

    name: str = Field(
        examples=["Qwen2.5-VL-7B"],
        min_length=1,
        description="a registry name, a Hugging Face directory, or a config.json",
    )
    config: dict[str, Any] | None = Field(
        default=None, description="config.json fields; filled in when `name` is a path"
    )


class Cluster(Section):
    """The machines."""

    gpu: str = Field(examples=["H800"], description="GPU type (`rollplex gpus`), or cpu for the host backend")
    gpus_per_node: Count = Field(default=8, description="GPUs of one node (processes, on cpu)")
    nodes: Count = Field(default=1, description="number of identical nodes")
    rollout_gpus: Count | None = Field(
        default=None,
        description="GPUs of the rollout pool, the last of the cluster; the rest train (schedule: disaggregated)",
    )
    host_memory_gb: Gb = Field(
        examples=[1400], description='host memory of one node, GB (decimal) or with a unit: "1.4 TB"'
    )
    capacity_gib: Gib | None = Field(
        default=None,
        gt=0,
        description="memory of one GPU that software can use, GiB; null takes the GPU's own; required on cpu",
    )
    pinned_share: float = Field(
        default=0.85, gt=0, le=1, description="part of the host memory that may be pinned for the pool"
    )
    calibration: Calibration | None = Field(
        default=None,
        description="file that `rollplex calibrate` wrote on this GPU type for this model, relative to the job file; "
        "predicted seconds rest on it, and sharing.kind solved needs it. A plan holds its content",
    )
    internode_gb_s: Positive = Field(default=50.0, description="network between nodes, GB/s per node and direction")
    context_gib: Gib | None = Field(
        default=None,
        description="CUDA context and kernels of one process, GiB or with a unit; "
        f"null takes {CONTEXT_MIB} MiB, and nothing on cpu (benchmarks/results/context_h200.md)",
    )
    nccl_gib: Gib | None = Field(
        default=None,
        description="NCCL buffers of one process that works in groups of GPUs, GiB or with a unit; null takes "
        f"{FIRST_COMMUNICATOR_MIB} MiB for its first communicator and {COMMUNICATOR_MIB} for each other, and what a "
        "rollout engine's own all-reduces take, nothing on cpu",
    )
    process_host_gib: Gib | None = Field(
        default=None,
        description="host memory of one process beside pinned memory and data, GiB or with a unit; "
        f"null takes {PROCESS_HOST_MIB} MiB, and nothing on cpu (benchmarks/results/host_memory_h200.md)",
    )


class Lora(Section):
    """Train low-rank adapters beside the linear layers of the language model; its own weights stay as they are."""

    rank: Count = Field(examples=[64], description="rank r of the adapters: A is [r, in], B is [out, r]")
    targets: Annotated[tuple[Target, ...], Field(min_length=1), AfterValidator(_distinct)] = Field(
        default=("qkv", "o", "gate_up", "down"),
        description="linear layers that have an adapter; of routed experts each has its own",
    )
    served: Literal["adapter", "merged"] = Field(
        default="adapter",
        description="the rollout engine applies adapters beside the shared weights, or reads a copy of its own into "
        "which they are merged at every publication",
    )


class Role(Section):
    """One use of the model: which engines train it, sample from it, score with it."""

    model: RoleModel | None = Field(
        default=None, description="its own model; a name alone is short for {name: ..}; null is the job's model"
    )
    head: Literal["auto", "logits", "scalar"] = Field(
        default="auto",
        description="what the model ends in: logits, or one number as in a critic; auto: as the algorithm calls it",
    )
    weights: str | None = Field(
        default=None,
        description="directory of its initial weights, relative to the job file; null takes those of run.weights for "
        "the job's model and draws those of another; a trained role whose directory has no scalar head draws it",
    )
    train: Train | None = Field(default=None, description="present when the role is trained")
    rollout: Rollout | None = Field(default=None, description="present when the role generates responses")
    score: Score | None = Field(default=None, description="present when a frozen role computes log-probabilities")
    freeze: Annotated[tuple[Part, ...], AfterValidator(_distinct)] = Field(
        default=(), description="parts that are not trained; under lora the vision tower is one of them"
    )
    lora: Lora | None = Field(default=None, description="train adapters instead of the weights; for the policy")
    recompute: Recompute = Field(
        default="full",
        description="activations of suffix and backward: keep, redo whole layers, or (selective) the core of attention",
    )
    attention: Literal["flash", "unfused"] = Field(
        default="flash", description="flash attention, or one that keeps a score for every pair of tokens"
    )
    prefix_saved: Literal["auto", "host", "hbm", "dropped", "group"] = Field(
        default="auto",
        description="what the attached prefix saves for its backward: in host memory, in HBM, or recomputed; group: a "
        "group's prefix runs right before its train step, and HBM has room for what one of them saves; auto: whichever "
        "fits and takes least time",
    )

    @model_validator(mode="before")
    @classmethod
    def _written_out(cls, data: Any) -> Any:
        return frozen_tower(named_model(data))


class Layout(Section):
    """How training and rollout weights share bytes."""

    order: LayoutOrder = Field(
        default="stock",
        description="row order of the rollout engine's fused weights: its own; the trainer's, read by re-indexing"
        " activations; or for each weight what costs less decode time and HBM",
    )


class Optimizer(Section):
    """Adam on FP32 states, in chunks."""

    kind: Literal["adamw", "adam"] = Field(
        default="adamw", description="how weights decay: by themselves (adamw), or as a part of the gradient (adam)"
    )
    lr: NonNegative = Field(default=1.0e-6, description="learning rate")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        default=(0.9, 0.999), description="decay of the two moments"
    )
    eps: Positive = Field(default=1.0e-8, description="added to the root of the second moment")
    weight_decay: NonNegative = Field(default=0.0, description="weight decay")
    no_decay: Annotated[tuple[str, ...], AfterValidator(_distinct)] = Field(
        default=(),
        examples=[["*.bias", "*norm*"]],
        description="parameters that do not decay: patterns on Hugging Face names, * any text, ? one character",
    )
    clip_norm: Positive | None = Field(
        default=1.0, description="global gradient norm is clipped to this; null does not clip"
    )
    chunks: AutoOrCount = Field(
        default="auto", description="pieces the state is updated in; auto lets the solver choose"
    )
    in_flight: int = Field(default=3, ge=1, le=64, description="chunks whose load, update and return may overlap")
    snapshot: SnapshotPages = Field(
        default="auto",
        description="pages of the old weights during the update: keep them and write over them, or release them at the "
        "optimizer barrier and map new ones chunk by chunk; auto releases where a plan does not fit otherwise",
    )

    @property
    def joins_gradient(self) -> bool:
        """Whether decay is added to the gradient, of which torch's foreach Adam then makes a copy."""
        return self.kind == "adam" and self.weight_decay > 0


class Sharing(Section):
    """How prefix work and decode share a GPU."""

    kind: Literal["mps", "fixed", "solved"] = Field(
        default="mps",
        description="mps: as MPS schedules; fixed: a share of the SMs; solved: as cluster.calibration says is best, "
        "by how far decode has come",
    )
    share: Share | None = Field(default=None, description="part of the SMs for prefix work, with kind: fixed")


class Solver(Section):
    """Limits of the solver passes."""

    seconds: Positive = Field(default=30.0, description="deterministic time of one solve, seconds")
    seed: int = Field(default=0, ge=0, lt=2**31, description="random seed of the solver")


class RunOptions(Section):
    """What `rollplex run` needs and a plan does not."""

    data: str | None = Field(default=None, description="JSONL file of the prompts; relative to the job file")
    steps: Count = Field(default=100, description="iterations")
    seed: int = Field(default=0, ge=0, lt=2**63, description="random seed of data order and sampling")
    temperature: Positive = Field(default=1.0, description="sampling temperature")
    threads: Count = Field(default=1, description="CPU threads of one process")
    devices: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        default=(),
        description="CUDA device of each GPU of the node, by number; the same one twice lets ranks share it, each with "
        "its own cluster.capacity_gib; empty: 0, 1, ..",
    )
    weights: str | None = Field(default=None, description="directory of initial weights; relative to the job file")
    hosts: dict[str, str] = Field(
        default_factory=dict,
        description="host functions of the algorithm by name, FILE.py:FUNCTION or module:FUNCTION; a file is relative "
        "to the job file; --host comes first, then these, then HOSTS in the algorithm's file",
    )
    verify_weights: bool = Field(
        default=False,
        description="hash the weights at every publication and again before every rollout: bytes that nobody published "
        "are refused",
    )
    silent_s: Positive = Field(
        default=60.0, description="seconds after which a process that says nothing counts as dead"
    )
    step_timeout_s: NonNegative = Field(
        default=3600.0,
        description="seconds that a process may spend in one step, waiting for others or for its turn on a GPU not "
        "counted; 0 does not limit it",
    )
    checkpoint_every: NonNegativeCount = Field(
        default=20,
        description="iterations between two checkpoints; one more is written when the run ends or is interrupted; "
        "0 writes none",
    )
    checkpoints_kept: Count = Field(default=2, description="checkpoints that stay, the newest")
    reward_timeout_s: Positive = Field(default=30.0, description="seconds that one call of a host function may take")
    reward_workers: int = Field(default=8, ge=1, le=1024, description="calls of a host function that run at a time")
    when_short: Literal["fill", "stop"] = Field(
        default="fill",
        description="groups that teach nothing after the last round of dynamic_sampling: train without them, or stop",
    )
    reward_failure: Literal["stop"] | Annotated[float, Field(allow_inf_nan=False)] = Field(
        default="stop",
        description="what a call of a host function that raises or takes too long means: stop the run, or this score",
    )
    wandb: str | None = Field(
        default=None, min_length=1, description="Weights & Biases project that gets the metrics; needs package wandb"
    )
