"""The ways in which a weight class can lie for both engines, from the engines' row orders and abilities.

alias       one slab of the rollout shard, as both engines come                                  case 1
slabs       one slab a part: the trainer holds gate and up as two views                          case 1
interleave  [g0; u0; g1; u1; ..]: one slab, read by viewing y as [.., 2 f]; nothing is copied    case 1
reindex     QKV rows in the trainer's order: one slab, and a gather of q, k, v for every token   case 1
transpose   [I, O] instead of [O, I]: one slab, both engines read through a transposed view      case 2
rebuild     a buffer of the rollout engine's own, copied and permuted after every update         case 3
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

from rollplex.backends.facts import Block, EngineFacts, load_facts
from rollplex.ir.job import Job
from rollplex.ir.lora import lora_of
from rollplex.ir.models import Tensor
from rollplex.passes.layout_costs import LayoutCosts
from rollplex.passes.slabs import missing, parts, rows, same_rows, slabs

FUSED = {"q": "qkv", "k": "qkv", "v": "qkv", "q_bias": "qkv", "k_bias": "qkv", "v_bias": "qkv"}
FUSED |= {"gate": "gate_up", "up": "gate_up", "expert_gate_up": "expert_gate_up"}
View = Literal["alias", "slabs", "interleave", "reindex", "transpose", "rebuild"]
CASE: dict[View, Literal[1, 2, 3]] = {
    "alias": 1, "slabs": 1, "interleave": 1, "reindex": 1, "transpose": 2, "rebuild": 3,
}  # fmt: skip
REORDERED: dict[str, View] = {"qkv": "reindex", "gate_up": "interleave", "expert_gate_up": "interleave"}


@dataclass(frozen=True)
class Option:
    """One way to store a weight class; bytes and seconds are a GPU's, over all layers and one step."""

    view: View
    why: str
    slabs: int = 1
    buffer_bytes: int = 0
    decode_s: float = 0.0
    rebuild_s: float = 0.0
    needs: str = ""

    @property
    def seconds(self) -> float:
        """What it adds to a step."""
        return self.decode_s + self.rebuild_s


@dataclass(frozen=True)
class WeightClass:
    """Tensors that an engine fuses or stores alike, over all layers; `pieces` are matrices, several in a stack."""

    name: str
    tensors: tuple[Tensor, ...]
    shard_bytes: int
    options: tuple[Option, ...]
    pieces: int = 1
    orders: Orders | None = None


@dataclass(frozen=True)
class Orders:
    """The row orders of one fused weight: one shard a training rank, one a rollout rank."""

    train: tuple[tuple[Block, ...], ...]
    rollout: tuple[tuple[Block, ...], ...]

    @property
    def q(self) -> int:
        """Training ranks to a rollout rank."""
        return len(self.train) // len(self.rollout)

    @cached_property
    def slabs(self) -> int | None:
        """Most slabs in which a training shard lies in the rollout engine's own order; None where rows are lacking."""
        found = [slabs(inner, self.rollout[g // self.q]) for g, inner in enumerate(self.train)]
        return max(len(f) for f in found if f is not None) if None not in found else None

    @property
    def apart(self) -> bool:
        """Whether each part of every training shard is one slab by itself."""
        return self.slabs is not None and self.slabs <= max(parts(inner) for inner in self.train)

    @cached_property
    def joined(self) -> tuple[tuple[Block, ...], ...]:
        """Every rollout shard as its training shards, one behind the other."""
        q = self.q
        return tuple(tuple(b for j in range(q) for b in self.train[r * q + j]) for r in range(len(self.rollout)))

    @cached_property
    def joinable(self) -> bool:
        """Whether the joined shards hold exactly the rows that the rollout ranks need."""
        return all(same_rows(a, b) for a, b in zip(self.joined, self.rollout, strict=True))

    @cached_property
    def shares(self) -> tuple[tuple[Fraction, ...], ...]:
        """[t][u]: of the rows that the rollout rank on training rank t's GPU needs, the share that u owns."""
        needs = [self.rollout[t // self.q] for t in range(len(self.train))]
        return tuple(tuple(1 - Fraction(missing(need, own), rows(need)) for own in self.train) for need in needs)


@dataclass(frozen=True)
class Options:
    """Makes the options of a job's weight classes under a row order: stock, reindex or auto."""

    job: Job
    order: str

    @cached_property
    def trainer(self) -> EngineFacts:
        """Facts of the training engine."""
        return load_facts(self.job.trainer(self.job.policy).engine)

    @cached_property
    def roller(self) -> EngineFacts:
        """Facts of the rollout engine."""
        rollout = self.job.roles[self.job.policy].rollout
        assert rollout is not None
        return load_facts(rollout.engine)

    @cached_property
    def costs(self) -> LayoutCosts:
        """Seconds of the job's layouts."""
        return LayoutCosts(self.job)

    def classes(self) -> list[WeightClass]:
        """The language model's weights by class; the vision tower is replicated and aliases as it is."""
        groups: dict[str, list[Tensor]] = {}
        for tensor in self.job.spec.tensors():
            if tensor.part == "language":
                groups.setdefault(FUSED.get(tensor.kind, tensor.kind), []).append(tensor)
        return [self._class(name, tuple(tensors)) for name, tensors in groups.items()]

    def _class(self, name: str, tensors: tuple[Tensor, ...]) -> WeightClass:
        job = self.job
        nbytes = sum(job.spec.shard_numel(t, job.rollout_tp) for t in tensors) * job.itemsize
        pieces = tensors[0].shape[0] if name.startswith("expert_") else 1
        orders = self.orders(name) if name in REORDERED else None
        options = self.fused(name, orders, nbytes) if orders else self.plain(name, tensors[0], nbytes)
        return WeightClass(name, tensors, nbytes, options, pieces, orders)

    def orders(self, name: str) -> Orders:
        """Both engines' row orders of a fused weight."""
        spec, tp_t, tp_r = self.job.spec, self.job.train_tp, self.job.rollout_tp
        return Orders(
            tuple(self.trainer.rows(spec, name, tp_t, g) for g in range(tp_t)),
            tuple(self.roller.rows(spec, name, tp_r, r) for r in range(tp_r)),
        )

    # ---- what the engines fuse

    def fused(self, name: str, orders: Orders, nbytes: int) -> tuple[Option, ...]:
        """Options of a weight that engines fuse."""
        if orders.slabs == 1:
            return (Option("alias", "same row order, nested shards"),)
        found: list[Option] = []
        obstacle = self._obstacle(name, orders) if self.order != "stock" else ""
        if self.order != "stock" and not obstacle:
            found.append(self._reordered(name))
        if name in self.trainer.split_views and orders.apart:
            found.append(self._apart(name, orders.slabs or 1))
        reason = "; ".join(r for r in (self._differs(name, orders), obstacle) if r)
        return (*found, self._rebuild(reason, nbytes))

    def _obstacle(self, name: str, orders: Orders) -> str:
        """Why the rollout engine cannot read the trainer's order; empty when it can."""
        if not orders.joinable:
            return "re-indexing cannot supply rows of other ranks"
        if name not in self.roller.reindexes:
            return f"{self.roller.name} does not re-index {name}"
        if (lora := lora_of(self.job)) and name in lora.targets:
            return f"{self.roller.name}'s LoRA adds to {name} in the engine's own row order"
        return ""

    def _differs(self, name: str, orders: Orders) -> str:
        spec, tp = self.job.spec, self.job.rollout_tp
        if not orders.joinable:
            return f"{tp} ranks, {spec.kv_heads} KV heads: {self.roller.name} repeats KV rows on its ranks"
        return f"{name} rows are ordered differently by the engines"

    def _reordered(self, name: str) -> Option:
        engine = self.roller.name
        if name == "qkv":
            token_bytes = self._qkv_bytes()
            gathered = token_bytes // self.job.spec.layers
            why = f"the trainer's row order; q, k and v gathered, {gathered:,} B a token and layer"
            needs = f"{engine}: an attention layer that re-indexes q, k and v"
            return Option("reindex", why, decode_s=self.costs.reindex_s(token_bytes), needs=needs)
        why = "rows interleaved by training rank; the activation is viewed, not copied"
        return Option("interleave", why, needs=f"{engine}: an MLP layer that views gate and up by training rank")

    def _qkv_bytes(self) -> int:
        """Bytes of q, k and v of one token on one rollout rank, over all layers."""
        spec = self.job.spec
        heads = (spec.heads + 2 * spec.kv_heads) // self.job.rollout_tp
        return heads * spec.head_dim * self.job.itemsize * spec.layers

    def _apart(self, name: str, count: int) -> Option:
        engine, custom = self.trainer.name, name in self.trainer.fuses
        why = f"gate and up lie in {count} slabs: the trainer holds them as two views"
        need = f"{engine}: {name} as two parameters; its own single [2f, H] cannot alias"
        return Option("slabs", why, slabs=count, needs=need if custom else "")

    # ---- what is stored alone

    def plain(self, name: str, tensor: Tensor, nbytes: int) -> tuple[Option, ...]:
        """Options of a weight that is stored alone."""
        if tensor.axis is None:
            return (Option("alias", "replicated"),)
        if self.job.q == 1:
            return (Option("alias", "identical shards"),)
        if tensor.axis == 0:
            return (Option("alias", "nested row ranges"),)
        unable = [e.name for e in (self.trainer, self.roller) if name not in e.transposed]
        if unable:
            why = f"sharded along I, the innermost axis, and {' and '.join(unable)} cannot read {name} transposed"
            return (self._rebuild(why, nbytes),)
        transpose = Option(
            "transpose", "row-parallel, stored [I, O]", decode_s=self.costs.transposed_s(nbytes),
            needs=f"{self.trainer.name}: row-parallel linears whose parameter is [I, O]",
        )  # fmt: skip
        return transpose, self._rebuild("sharded along I, the innermost axis", nbytes)

    def _rebuild(self, why: str, nbytes: int) -> Option:
        again = self.costs.rebuild_s(nbytes) if lora_of(self.job) is None else 0.0
        return Option("rebuild", why, buffer_bytes=nbytes, rebuild_s=again)
