"""A compiled plan: what every process does in one iteration, and what every GPU holds meanwhile; pydantic and JSON.

plan = read_plan("plan.json"); plan.summary.peak_hbm_bytes; plan.programs["train"][0]
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from rollplex.ir.errors import PlanError, Problem
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.ir.planned_node import NodeMemory
from rollplex.ir.planned_pool import HostPool
from rollplex.ir.planned_rounds import Rounds
from rollplex.ir.planned_sharing import Policy
from rollplex.ir.planned_turns import Trajectories, TurnTimes
from rollplex.ir.processes import ProcessKind
from rollplex.ir.steps import Flag, Number, Seconds, Step, Strict, Whole
from rollplex.ir.textfile import read_text

SCHEMA_VERSION = 3
MAX_SLOTS = 65536
MOST_PLAN_BYTES = 1 << 30

StateClass = Literal["permanent", "regenerable", "boundary", "phase-local"]
Residency = Literal["hbm", "host", "dropped", "-"]
Slots = Annotated[int, Field(strict=True, ge=1, le=MAX_SLOTS)]
BARRIERS = ("rollout-complete", "theta-quiet", "published")


class PlannedObject(Strict):
    """One line of the state contract: tensors with one lifetime and one policy, sized for one GPU."""

    name: str
    title: str
    class_: StateClass = Field(alias="class")
    role: str
    process: str = Field(description="process kind that owns the pages")
    readers: tuple[str, ...] = Field(default=(), description="process kinds that import the pages")
    bytes: Whole = Field(description="bytes a GPU, rounded up to pages")
    slots: Slots = Field(default=1, description="equal parts, one for each microbatch")
    attached: Flag = False
    host_backed: Flag = Field(default=False, description="the pinned pool always holds a valid copy (frozen weights)")
    recomputable: Flag = Field(default=False, description="may be dropped and made again before its next use")
    start: Residency = Field(description="where it is when an iteration starts, and again when it ends")
    produced: str = Field(description="window that produces it; `start` when it is there from the start")
    consumed: tuple[str, ...] = Field(description="windows that use it, in order")
    residency: dict[str, Residency]
    why: str = ""


class WindowSummary(Strict):
    """What a GPU and its share of the pinned pool hold, at most, in one window: a GPU of the pool that holds most."""

    name: str
    phase: Literal["P1", "P2", "P3"]
    seconds: Seconds = Field(description="predicted")
    hbm_bytes: Whole
    host_bytes: Whole
    by_object: dict[str, Whole] = Field(
        description="HBM bytes by object, over all pools; of what comes or goes in parts at the fullest moment"
    )


class OptimizerChunks(Strict):
    """The streamed update: `count` chunks of at most `bytes` of FP32 state and gradient."""

    count: Whole
    elements: Whole = Field(description="parameters in one chunk")
    bytes: Whole
    workspace_bytes: Whole


class Microbatches(Strict):
    """Work units of the trainer: prompts a prefix step, responses a suffix step."""

    prefix_prompts: Whole
    suffix_responses: Whole
    workspace_bytes: dict[str, Whole]


class ChunkSummary(Strict):
    """What the chunk-sizes pass decided."""

    optimizer: OptimizerChunks = Field(description="of the policy")
    others: dict[str, OptimizerChunks] = Field(default_factory=dict, description="of every other trained role")
    microbatch: Microbatches

    def of(self, role: str) -> OptimizerChunks:
        """The chunks of a trained role's update."""
        return self.others.get(role, self.optimizer)


class Times(Strict):
    """Predicted seconds of one iteration: equation 1 of the paper."""

    decode_s: Seconds
    prefix_s: Seconds
    interference_s: Seconds
    post_s: Seconds
    exposed_transfer_s: Seconds
    serial_s: Seconds
    step_s: Seconds
    speedup_vs_serial: Seconds
    saving_bound_s: Seconds
    environment_s: Seconds = Field(default=0.0, description="between turns, when nothing is decoded")
    hidden_post_s: Seconds = Field(default=0.0, description="part of post_s that runs while others decode: `streamed`")
    hidden_offload_s: Seconds = Field(
        default=0.0, description="part of the gradients' way to the host that runs beside the backward that ends them"
    )
    streamed_s: Seconds | None = Field(default=None, description="what the step of `rollplex` would take `streamed`")
    turns: tuple[TurnTimes, ...] = Field(default=(), description="turn by turn, where there are several")


class SolverResult(Strict):
    """A solved pass: objective value, proven bound, and how the search ended. Seconds are not kept: plans repeat."""

    name: str
    status: Literal["optimal", "feasible"]
    objective: str
    value: Number
    bound: Number


class PoolSummary(Strict):
    """GPUs that the same processes share, and the most that one of them holds."""

    name: str
    gpus: Whole
    peak_hbm_bytes: Whole
    peak_window: str
    peak_host_bytes: Whole


class Tail(Strict):
    """How decode's tail is cut: a step takes `taken` of the `sampled` prompt groups, the first to complete.

    Each data-parallel rank takes its share of both; where prefixes run before it is known which groups complete, a rank
    has a slot for every sampled one, and those of the completed ones are numbered first when rollout is complete.
    """

    kind: Literal["partial", "oversample"]
    sampled: Whole
    taken: Whole
    carried: str = Field(default="", description="the object that holds the unfinished responses of partial rollout")
    ends_at_tokens: Number = Field(description="predicted length of the decode window, tokens of a fresh response")
    snapshots: Whole = Field(description="snapshots that the tokens of the longest response come from, predicted")


class Candidate(Strict):
    """One choice of the degrees that a job left to the compiler."""

    degrees: dict[str, Whole] = Field(description="key of the job -> value")
    feasible: bool
    compiled: bool = Field(default=True, description="false where a lower bound was enough to refuse it")
    step_s: Number | None = Field(default=None, description="predicted; null where nothing was compiled")
    peak_bytes: Whole = Field(description="of the fullest GPU; a lower bound where nothing was compiled")
    why_not: str = Field(default="", description="what it lacks; empty where it fits")


class Summary(Strict):
    """What `--plan-only` prints; there for infeasible plans too: what the schedule needs if capacity had no limit."""

    capacity_bytes: Whole
    host_capacity_bytes: Whole = Field(description="one GPU's share of the pinned pool")
    peak_hbm_bytes: Whole
    peak_window: str
    peak_host_bytes: Whole
    batch_bytes: Whole = Field(description="one step's prompts, pixels and responses, in the controller's host memory")
    pools: tuple[PoolSummary, ...] = Field(min_length=1, description="one, or one for rollout and one for training")
    tail: Tail | None = Field(default=None, description="absent where decode waits for every response")
    rounds: Rounds | None = Field(default=None, description="absent where every prompt is sampled for once")
    trajectories: Trajectories | None = Field(default=None, description="absent where a trajectory has one turn")
    objects: tuple[PlannedObject, ...]
    windows: tuple[WindowSummary, ...]
    layout: LayoutSummary
    host_pool: HostPool
    node: NodeMemory
    chunks: ChunkSummary
    times: Times
    policy: Policy
    solvers: tuple[SolverResult, ...]
    degrees: dict[str, Whole] = Field(default_factory=dict, description="values chosen for `auto`, by key of the job")
    runners_up: tuple[Candidate, ...] = Field(default=(), description="the other legal degrees, best first")
    warnings: tuple[str, ...]


class ObjectBytes(Strict):
    """An object and its bytes, for lists ordered by size."""

    name: str
    bytes: Whole


class Remedy(Strict):
    """Changes to the job that make it fit, what they free in the window that was over, and what they cost."""

    change: str = Field(description="`key=value` overrides, separated by blanks, to be pasted behind a command")
    frees_bytes: int = Field(strict=True, description="fewer bytes in the window that was over (negative: more)")
    costs_s: Number = Field(description="predicted seconds that a step takes longer")
    costs_share: Number = Field(default=0.0, description="growth of the GPU seconds of one prompt: 0.1 is 10 % more")
    shrinks: tuple[str, ...] = Field(default=(), description="objects that leave the window that was over, or shrink")
    verified: bool = Field(default=False, description="compiled again with the change, and accepted by the checker")


Resource = Literal["hbm", "host", "node"]
"""A GPU's memory, its share of the pinned pool, the host memory of a node."""


class Infeasible(Strict):
    """Why a job does not fit: the first window over capacity, by how much, and what is live on the GPU in it."""

    window: str
    resource: Resource = "hbm"
    shortfall_bytes: Whole
    objects: tuple[ObjectBytes, ...]
    remedies: tuple[Remedy, ...]


class NodeRecord(Strict):
    """One node of the graph as data: `rx.masked_mean`, `torch.exp`, `Tensor.clamp`; references are {"ref": name}."""

    name: str
    op: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = Field(default_factory=dict)
    loc: str = ""
    phase: str = ""


def references(value: Any) -> Iterator[str]:
    """Names that encoded arguments of a record refer to, {"ref": name}, as often as they stand there."""
    match value:
        case {"ref": str(name)}:
            yield name
        case dict():
            for item in value.values():
                yield from references(item)
        case list() | tuple():
            for item in value:
                yield from references(item)


def is_observation(record: NodeRecord) -> bool:
    """Whether a host function makes the prompts of a next turn."""
    return record.op == "rx.host" and record.kwargs.get("returns") == "history"


class LossPlan(Strict):
    """A loss as data; `step` runs without grad, `group` with grad on one prompt group, `result` summed is the loss.

    `wide` values mix the prompts of the whole step (over all ranks) and must be computed from all of them, out of
    `wide_inputs`; `sliced` values have the prompt dim first and are cut to a group; `whole` values are passed on.
    Where all that groups add up is divided by one of the wide values, it is the `divisor`: groups run with 1 in its
    place, and the sums of loss and gradient are divided by it once, behind the last group.
    """

    role: str
    loss: str
    step: tuple[NodeRecord, ...]
    group: tuple[NodeRecord, ...]
    result: str
    forward: tuple[str, ...]
    wide: tuple[str, ...]
    wide_inputs: tuple[str, ...]
    sliced: tuple[str, ...]
    whole: tuple[str, ...]
    divisor: str = Field(default="", description="a wide value that sums over groups are divided by; empty: none")
    divisor_inputs: tuple[str, ...] = Field(default=(), description="what it is computed from")


class Plan(Strict):
    """The whole plan; `programs` has one list of steps for each process kind."""

    schema_version: Literal[3] = SCHEMA_VERSION
    feasible: Flag
    schedule: str
    algorithm: str = Field(description="file and name of the algorithm")
    job: dict[str, Any]
    graph: tuple[NodeRecord, ...]
    losses: dict[str, LossPlan] = Field(
        default_factory=dict, description="the loss of every trained role, taken apart by prompt group"
    )
    hosts: dict[str, str] = Field(default_factory=dict, description="host node -> name of the algorithm's parameter")
    not_executable: tuple[str, ...] = Field(default=(), description="features no backend can execute yet")
    summary: Summary
    infeasible: Infeasible | None = None
    processes: dict[str, ProcessKind]
    programs: dict[str, tuple[Step, ...]]

    def object(self, name: str) -> PlannedObject:
        """The planned object of this name; KeyError if the plan has none (our own bug)."""
        return next(o for o in self.summary.objects if o.name == name)

    def pool_of(self, name: str) -> str:
        """The pool whose GPUs hold an object: that of the process that owns it."""
        return self.processes[self.object(name).process].pool

    def to_json(self) -> str:
        """Stable text: the same plan gives the same bytes."""
        return json.dumps(self.model_dump(mode="json", by_alias=True), indent=1, sort_keys=False) + "\n"


def read_plan(path: str | Path) -> Plan:
    """Read and validate a plan file's form; whether it is safe to run is the checker's to say. Raises PlanError."""
    try:
        text = read_text(Path(path), MOST_PLAN_BYTES)
    except OSError as err:
        raise PlanError(f"cannot read the plan: {err.strerror}", where=path) from None
    except UnicodeDecodeError:
        raise PlanError("the plan is not text", where=path, hint="pass a file made by `rollplex compile -o`") from None
    except ValueError as err:
        raise PlanError(f"cannot read the plan: {err}", where=path) from None
    try:
        data = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as err:  # ValueError: also an integer of thousands of digits
        raise PlanError(f"not JSON: {err}", where=path, hint="compile the plan again") from None
    return parse_plan(data, str(path))


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def parse_plan(data: Any, where: str = "plan") -> Plan:
    """Build a plan from parsed JSON; every wrong key or value is reported at once."""
    if not isinstance(data, dict) or "schema_version" not in data:
        raise PlanError(
            "not a plan: it has no schema_version", where=where, hint="pass a file made by `rollplex compile -o`"
        )
    if data["schema_version"] != SCHEMA_VERSION:
        raise PlanError(
            f"schema_version {data['schema_version']!r}, this Rollplex reads {SCHEMA_VERSION}",
            where=where,
            hint="compile the plan again with this version",
        )
    try:
        return Plan.model_validate(data)
    except ValidationError as err:
        problems = [Problem(e["msg"], f"{where}: {'.'.join(map(str, e['loc']))}") for e in err.errors()[:20]]
        raise PlanError(*problems) from None
