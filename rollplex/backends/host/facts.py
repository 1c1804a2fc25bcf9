"""The host engine for the compiler: the sizes of its work, and its weight order: parts one behind the other."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollplex.backends.facts import Block
from rollplex.backends.ordering import stacked
from rollplex.backends.training import sizes
from rollplex.ir.models import ModelSpec
from rollplex.ir.serving import Serving
from rollplex.ir.work import Work


@dataclass(frozen=True)
class HostFacts:
    """transformers' Qwen2.5-VL modules, on CPU processes or on GPUs: trainer, scorer and rollout engine."""

    name: str = "host"
    trains: bool = True
    rolls_out: bool = True
    runs: bool = True
    on_cpu: bool = True
    families: frozenset[str] = frozenset({"qwen2_5_vl"})
    whole_sequences: bool = False
    overlaps_update: bool = True
    transposed: frozenset[str] = frozenset({"o", "down"})
    split_views: frozenset[str] = frozenset({"gate_up"})
    fuses: frozenset[str] = frozenset()
    reindexes: frozenset[str] = frozenset({"qkv", "gate_up"})
    adapter_ranks: tuple[int, ...] = ()

    def profile_bytes(self, serving: Serving) -> int:
        """No profile run: its memory is a setting of the job."""
        raise AssertionError("not an engine with a share of the memory")

    def rows(self, spec: ModelSpec, fused: str, tp: int, rank: int) -> tuple[Block, ...]:
        """One block a part: separate projections in its trainer, one fused weight in its rollout engine."""
        return stacked(spec, fused, tp, rank)

    def prefix_saved_bytes(self, work: Work) -> int:
        """Saved tensors of one attached prefix, in a later turn of all trajectories of a group."""
        return work.sequences * sizes.prefix_saved_bytes(one_trajectory(work))

    def prefix_workspace_bytes(self, work: Work, attached: bool) -> int:
        """Temporaries of one prefix forward."""
        return sizes.prefix_workspace_bytes(one_trajectory(work), attached)

    def score_workspace_bytes(self, work: Work) -> int:
        """Temporaries of one suffix forward."""
        return sizes.score_workspace_bytes(one_trajectory(work))

    def train_activation_bytes(self, work: Work) -> int:
        """Suffix step, and prefix backward with everything made again: their sum, more than either needs."""
        one = one_trajectory(work)
        return sizes.suffix_train_bytes(one) + sizes.prefix_backward_bytes(one) + sizes.pieces_bytes(work)

    def full_activation_bytes(self, work: Work) -> int:
        """Working memory of any task on one prompt and its response, where nothing is saved between tasks."""
        forward = max(sizes.prefix_workspace_bytes(work, attached=True), sizes.score_workspace_bytes(work))
        return max(forward, sizes.suffix_train_bytes(work), sizes.prefix_backward_bytes(work))


def one_trajectory(work: Work) -> Work:
    """The work of a later turn as the host engine does it: one trajectory after the other, with its one response."""
    if work.turn == 1:
        return work
    return replace(work, sequences=1, responses=1, patches=work.patches // work.sequences)


FACTS = HostFacts()
