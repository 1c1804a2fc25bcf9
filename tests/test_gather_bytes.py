"""The exchange after an update by bytes: every GPU of a cluster, every element of every weight, under stages and EP.

Each element of a small model has its own number. What a training GPU owns is dealt out here as Megatron-Core does it,
what a rollout GPU needs as vLLM does; what it lacks, over how many GPUs its pieces lie and what crosses nodes is then
counted by sets of numbers, and compared with what the layout says. Nothing of the passes is used to count.

    rank = stage * (GPUs / PP) + copy * TP + t        experts of copy c: those of EP rank c mod EP
    rollout rank R: all layers, all experts; each matrix cut over the rollout engine's tensor ranks alone
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pytest

from rollplex.ir.job import Job
from rollplex.ir.planned_layout import LayoutSummary
from rollplex.passes.layout import layout_of

HIDDEN, HEADS, KV, HEAD, FFN, VOCAB, EXPERTS, ITEM = 16, 8, 4, 2, 16, 128, 4, 2
DENSE = {
    "model_type": "qwen2", "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": KV,
    "head_dim": HEAD, "intermediate_size": FFN, "vocab_size": VOCAB,
}  # fmt: skip
MOE = DENSE | {
    "model_type": "qwen3_vl_moe", "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": FFN,
    "vision_config": {
        "hidden_size": 8, "depth": 1, "num_heads": 2, "intermediate_size": 8, "patch_size": 2, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": HIDDEN, "num_position_embeddings": 4,
        "deepstack_visual_indexes": [],
    },
}  # fmt: skip
Elements = dict[str, set[int]]
"""Class of weights -> numbers of the elements that a GPU has or needs."""


@dataclass(frozen=True)
class Case:
    """Degrees of a trainer and of its rollout engine, on nodes of four GPUs."""

    tp: int
    rollout: int
    pp: int = 1
    ep: int = 1
    layers: int = 4
    first: int | None = None
    last: int | None = None
    moe: bool = False
    tied: bool = False
    nodes: int = 4
    frozen: bool = False

    @property
    def job(self) -> Job:
        """The job of these degrees, one prompt a copy and an engine."""
        train = {
            "tensor_parallel": self.tp, "pipeline_parallel": self.pp, "expert_parallel": self.ep,
            "num_layers_in_first_pipeline_stage": self.first, "num_layers_in_last_pipeline_stage": self.last,
        }  # fmt: skip
        config: dict[str, Any] = (MOE if self.moe else DENSE) | {
            "num_hidden_layers": self.layers, "tie_word_embeddings": self.tied,
        }  # fmt: skip
        rollout = {"tensor_parallel": self.rollout, "kv_cache_gib": 1}
        actor = {"train": train, "rollout": rollout, "freeze": ["vision"] if self.frozen else []}
        return Job.model_validate({
            "model": {"name": "small", "config": config},
            "cluster": {"gpu": "H800", "gpus_per_node": 4, "nodes": self.nodes, "host_memory_gb": 100},
            "roles": {"actor": actor},
            "workload": {"prompts": 16, "group": 1, "prompt_tokens": 8, "response_tokens": 8},
        })  # fmt: skip


@dataclass(frozen=True)
class Cluster:
    """Who owns which elements after an update, and who needs which, GPU by GPU."""

    case: Case

    @property
    def gpus(self) -> int:
        return 4 * self.case.nodes

    @cached_property
    def sizes(self) -> list[int]:
        """Layers of each stage."""
        c = self.case
        middle = c.pp - (c.first is not None) - (c.last is not None)
        each = (c.layers - (c.first or 0) - (c.last or 0)) // max(middle, 1)
        return [c.first or each] * (c.pp > 0) + [each] * (c.pp - 2) + ([c.last or each] if c.pp > 1 else [])

    def stage_of(self, layer: int) -> int:
        return next(s for s in range(self.case.pp) if layer < sum(self.sizes[: s + 1]))

    def place(self, gpu: int) -> tuple[int, int, int]:
        """Stage, copy and tensor rank of the training rank on a GPU."""
        in_stage = self.gpus // self.case.pp
        return gpu // in_stage, gpu % in_stage // self.case.tp, gpu % self.case.tp

    @cached_property
    def weights(self) -> list[tuple[str, int | None, dict[str, np.ndarray]]]:
        """(class, layer, parts): every element of the language model with its own number."""
        fresh = itertools.count()

        def new(*shape: int) -> np.ndarray:
            return np.array([next(fresh) for _ in range(int(np.prod(shape)))]).reshape(shape)

        found: list[tuple[str, int | None, dict[str, np.ndarray]]] = [("embed", None, {"w": new(VOCAB, HIDDEN)})]
        for layer in range(self.case.layers):
            columns = (HIDDEN,) if self.case.moe else (HIDDEN, 1)  # a bias is a weight of one column
            for width in columns:
                found.append(("qkv", layer, {p: new(n * HEAD, width) for p, n in (("q", HEADS), ("k", KV), ("v", KV))}))
            found.append(("o", layer, {"w": new(HIDDEN, HEADS * HEAD)}))
            norms = ("norm", "norm", "q_norm", "k_norm") if self.case.moe else ("norm", "norm")
            found += [(n, layer, {"w": new(HIDDEN if n == "norm" else HEAD)}) for n in norms]
            if self.case.moe:
                found.append(("expert_gate_up", layer, {p: new(EXPERTS, FFN, HIDDEN) for p in ("gate", "up")}))
                found.append(("expert_down", layer, {"w": new(EXPERTS, HIDDEN, FFN)}))
                found.append(("router", layer, {"w": new(EXPERTS, HIDDEN)}))
            else:
                found.append(("gate_up", layer, {p: new(FFN, HIDDEN) for p in ("gate", "up")}))
                found.append(("down", layer, {"w": new(HIDDEN, FFN)}))
        found.append(("norm", None, {"w": new(HIDDEN)}))
        return found if self.case.tied else [*found, ("head", None, {"w": new(VOCAB, HIDDEN)})]

    def owned(self, gpu: int) -> Elements:
        """Megatron-Core: whole groups of q, k, v rows; whole experts; the embedding on the first stage, and so on."""
        stage, copy, t = self.place(gpu)
        case, found = self.case, defaultdict(set)
        for name, layer, parts in self.weights:
            last = [case.pp - 1] if name != "embed" else [0, case.pp - 1] if case.tied else [0]
            if stage in ([self.stage_of(layer)] if layer is not None else last):
                found[name] |= self._trained(name, parts, copy, t)
        return found

    def _trained(self, name: str, parts: dict[str, np.ndarray], copy: int, t: int) -> set[int]:
        case = self.case
        if name == "qkv":
            n, rows = HEADS // KV, []
            for g in range(KV):
                rows += [parts["q"][g * n * HEAD : (g + 1) * n * HEAD]]
                rows += [parts[p][g * HEAD : (g + 1) * HEAD] for p in ("k", "v")]
            return set(np.split(np.concatenate(rows), case.tp)[t].ravel().tolist())
        if name.startswith("expert"):
            mine = EXPERTS // case.ep
            parts = {p: w[copy % case.ep * mine : (copy % case.ep + 1) * mine] for p, w in parts.items()}
        return cut(name, parts, case.tp, t)

    def needed(self, rank: int) -> Elements:
        """vLLM: q, k and v rows by head, a KV head on several ranks if there are more; all experts, each cut."""
        case, found = self.case, defaultdict(set)
        for name, _, parts in self.weights:
            if name == "qkv":
                q = np.split(parts["q"], case.rollout)[rank]
                heads = range(
                    rank * KV // case.rollout, max((rank + 1) * KV // case.rollout, rank * KV // case.rollout + 1)
                )
                kv = [parts[p][h * HEAD : (h + 1) * HEAD] for p in ("k", "v") for h in heads]
                found[name] |= set(np.concatenate([q, *kv]).ravel().tolist())
            else:
                found[name] |= cut(name, parts, case.rollout, rank)
        return found

    @cached_property
    def rank_of(self) -> list[int]:
        """The rollout rank on each GPU, as the layout places it in every tensor-parallel group."""
        placed = {g: r for gpus in layout(self.case).placement.values() for r, g in enumerate(gpus)}
        return [placed[gpu % self.case.tp] for gpu in range(self.gpus)]

    @cached_property
    def owns(self) -> list[Elements]:
        return [self.owned(gpu) for gpu in range(self.gpus)]

    @cached_property
    def needs(self) -> list[Elements]:
        by_rank = [self.needed(r) for r in range(self.case.rollout)]
        return [by_rank[self.rank_of[gpu]] for gpu in range(self.gpus)]

    def lacks(self, gpu: int) -> dict[str, int]:
        """Bytes of each class that a GPU needs and its training rank lacks."""
        return {name: ITEM * len(need - self.owns[gpu][name]) for name, need in self.needs[gpu].items()}


def cut(name: str, parts: dict[str, np.ndarray], tp: int, rank: int) -> set[int]:
    """Column-parallel weights along their rows, row-parallel ones along their columns, the rest whole."""
    axis = {"embed": 0, "head": 0, "gate_up": 0, "o": 1, "down": 1, "expert_gate_up": 1, "expert_down": 2}.get(name)
    pieces = (w if axis is None else np.split(w, tp, axis=axis)[rank] for w in parts.values())
    return {int(n) for piece in pieces for n in piece.ravel()}


def layout(case: Case) -> LayoutSummary:
    return layout_of(case.job).summary


CASES = [
    Case(2, 1), Case(4, 2), Case(4, 4), Case(8, 4), Case(8, 8),
    Case(2, 1, pp=2), Case(4, 2, pp=2), Case(2, 2, pp=4), Case(2, 1, pp=4, tied=True), Case(2, 1, pp=2, tied=True),
    Case(2, 1, pp=2, layers=5, first=2), Case(2, 2, pp=4, layers=7, first=1),
    Case(2, 1, pp=4, layers=7, first=1, last=2),
    Case(2, 1, pp=2, layers=5, last=1, tied=True), Case(2, 1, pp=2, layers=3, first=1, last=2), Case(8, 8, pp=2),
    Case(2, 1, moe=True), Case(2, 2, ep=2, moe=True), Case(2, 1, ep=2, moe=True), Case(1, 1, ep=4, moe=True),
    Case(2, 1, pp=2, ep=2, moe=True), Case(2, 2, pp=2, ep=4, moe=True, tied=True), Case(4, 2, pp=2, ep=2, moe=True),
    Case(2, 1, pp=2, ep=2, layers=5, first=2, moe=True), Case(2, 1, pp=2, moe=True, frozen=True),
    Case(1, 1, pp=2, ep=2, moe=True, nodes=1), Case(2, 1, pp=2, nodes=1),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_a_gpu_receives_by_elements(case: Case) -> None:
    """The GPU that lacks most lacks what the plan says, class by class; nobody lacks more."""
    cluster, found = Cluster(case), layout(case)
    lacking = [cluster.lacks(gpu) for gpu in range(cluster.gpus)]
    most = max(sum(by_class.values()) for by_class in lacking)
    told = {c.name: c.receives_bytes for c in found.classes}
    assert found.exchange_bytes_per_gpu == most
    assert told in [by_class for by_class in lacking if sum(by_class.values()) == most]
    assert {c.name: c.shard_bytes for c in found.classes} == {n: ITEM * len(e) for n, e in cluster.needs[0].items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_over_how_many_gpus_a_shard_is_gathered(case: Case) -> None:
    """A GPU's elements of a layer are in as many pieces, each with owners of its own, as the plan's group has GPUs."""
    cluster = Cluster(case)
    owners: dict[tuple[str, int], list[int]] = defaultdict(list)
    for gpu, own in enumerate(cluster.owns):
        for name, elements in own.items():
            for e in elements:
                owners[name, e].append(gpu)
    for c in layout(case).classes:
        for gpu in range(0, cluster.gpus, 3):
            pieces = {tuple(owners[c.name, e]) for e in cluster.needs[gpu][c.name]}
            if c.name in ("qkv", "o", "gate_up", "down", "expert_gate_up", "expert_down"):
                assert len(pieces) == c.group, c.name
            assert all(any(owner in near(cluster, gpu, c.name, c.group) for owner in piece) for piece in pieces)


def near(cluster: Cluster, gpu: int, name: str, group: int) -> set[int]:
    """The GPUs that a group of this size can be: neighbours within TP, the next copies of it, all stages."""
    case, (_, copy, t) = cluster.case, cluster.place(gpu)
    ep = case.ep if name.startswith("expert") else 1
    wide = max(1, group // (case.pp * ep))
    in_stage = cluster.gpus // case.pp
    copies, ranks = range(copy - copy % ep, copy - copy % ep + ep), range(t - t % wide, t - t % wide + wide)
    return {s * in_stage + c * case.tp + r for s in range(case.pp) for c in copies for r in ranks}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_what_crosses_nodes_by_elements(case: Case) -> None:
    """GPUs of a node that gather one shard fetch what their node lacks once; a GPU's share of that, on its node."""
    cluster, found = Cluster(case), layout(case)
    tower = found.tower_bytes
    shares = []
    for node in range(case.nodes):
        mine, total = range(4 * node, 4 * node + 4), 0
        fetched: dict[tuple[str, frozenset[int]], int] = {}
        for gpu in mine:
            for c in (c for c in found.classes if c.group > 1):
                group = near(cluster, gpu, c.name, c.group)
                there = [g for g in mine if g in group]
                had = set().union(*(cluster.owns[g][c.name] for g in there))
                fetched[c.name, frozenset(group)] = ITEM * len(cluster.needs[gpu][c.name] - had)
            stage, copy, t = cluster.place(gpu)
            source = copy * case.tp + t
            total += tower / case.tp if stage and source // 4 != node else 0
        shares.append((total + sum(fetched.values())) / 4)
    assert found.between_nodes_bytes == pytest.approx(max(shares), rel=1e-3, abs=64)
    assert (found.between_nodes_bytes == 0) == (max(shares) == 0)


def test_every_gpu_hosts_the_rollout_rank_of_its_slab() -> None:
    """{e, e + q, ..} in every tensor-parallel group of every stage: all that a GPU owns is of its rollout shard."""
    case = Case(4, 2, pp=2)
    cluster = Cluster(case)
    assert layout(case).placement == {"engine 0": (0, 2), "engine 1": (1, 3)}
    assert layout(case).groups == 4
    for gpu in range(cluster.gpus):
        gate_up, own = cluster.needs[gpu]["gate_up"], cluster.owns[gpu]["gate_up"]
        assert own <= gate_up
        assert len(gate_up) == len(own) * 2 * 2  # q x PP


TOWERS = [
    (Case(2, 1, pp=2, moe=True), True), (Case(2, 1, moe=True), False), (Case(2, 1, pp=2), False),
    (Case(2, 1, pp=2, moe=True, frozen=True), False),
]  # fmt: skip


@pytest.mark.parametrize(("case", "told"), TOWERS)
def test_a_trained_tower_goes_to_the_other_stages(case: Case, told: bool) -> None:
    """The first stage trains it, every GPU rolls out with it; a frozen one never changes."""
    assert layout(case).tower_bytes == (ITEM * case.job.spec.vision_parameters if told else 0)
