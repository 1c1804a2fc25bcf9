"""What the compiler must know of an engine: how it orders fused weights, and what its work needs in memory.

A backend is found by its name: `rollplex.backends.<name>.facts` holds `FACTS`, or an entry point of the group
`rollplex.backends` does. Facts are arithmetic on a model's shape; no engine is imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from rollplex.ir.engines import engine
from rollplex.ir.models import ModelSpec
from rollplex.ir.serving import Serving
from rollplex.ir.work import Work


@dataclass(frozen=True)
class Block:
    """Rows [start, stop) of one logical weight, in the order an engine stores them."""

    part: str
    start: int
    stop: int


class EngineFacts(Protocol):
    """What passes ask of an engine. Bytes are per GPU."""

    name: str
    trains: bool
    rolls_out: bool
    runs: bool
    """Whether `rollplex run` can execute on it."""
    on_cpu: bool
    """Whether it also runs as CPU processes, in a job whose `cluster.gpu` is cpu."""
    whole_sequences: bool
    """Whether it runs every response with its prompt before it, on weights that no other engine reads."""
    overlaps_update: bool
    """Whether load, update and return of neighbouring optimizer chunks run at the same time."""
    transposed: frozenset[str]
    """Row-parallel weights that may be stored [I, O] and read through .t() (`o`, `down`, `expert_down`)."""
    split_views: frozenset[str]
    """Fused weights that the engine can hold as one view a part (`gate_up`, `expert_gate_up`)."""
    fuses: frozenset[str]
    """Fused weights that the engine as it comes holds as one parameter: two views need a module of our own."""
    reindexes: frozenset[str]
    """Fused weights that may lie in another row order: the engine re-indexes what they give (`qkv`, `gate_up`)."""
    adapter_ranks: tuple[int, ...]
    """Ranks for which a rollout engine makes room when it serves LoRA adapters; empty where it does for any."""

    def profile_bytes(self, serving: Serving) -> int:
        """Peak of a rollout engine's profile run beside weights, with CUDA graphs; asked under a share of memory."""
        ...

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """The blocks of a fused weight (`qkv`, `gate_up`, `expert_gate_up`) on one rank, in storage order."""
        ...

    def prefix_saved_bytes(self, work: Work) -> int:
        """Autograd state of one attached prefix, kept from its forward until its backward."""
        ...

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """Temporaries of one prefix forward."""
        ...

    def score_workspace_bytes(self, work: Work) -> int:
        """Temporaries of one suffix forward without gradients."""
        ...

    def train_activation_bytes(self, work: Work) -> int:
        """Suffix forward and backward of `work.responses` responses, or one prefix backward: the larger."""
        ...

    def full_activation_bytes(self, work: Work) -> int:
        """Activations of prompt and response together, nothing recomputed: paper Table 1."""
        ...


def rank_range(rows: int, tp: int, rank: int) -> tuple[int, int]:
    """The even split of `rows` over `tp` ranks; ranks beyond the rows share one (replicated KV heads)."""
    if rows % tp:
        rank, tp = rank * rows // tp, rows
    return rank * rows // tp, (rank + 1) * rows // tp


def load_facts(name: str) -> EngineFacts:
    """The facts of the backend of this name; JobError lists the known names."""
    return engine(name)
