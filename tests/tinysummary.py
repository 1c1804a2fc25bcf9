"""What the tiny plans say of themselves: objects, windows and their bytes; see tinyplan.py."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

from tinyjob import MODEL

from rollplex.ir.plan import (
    ChunkSummary,
    Microbatches,
    OptimizerChunks,
    PlannedObject,
    Policy,
    PoolSummary,
    Residency,
    SolverResult,
    Summary,
    Tail,
    Times,
    WindowSummary,
)
from rollplex.ir.planned_layout import CaseBytes, LayoutAlternative, LayoutClass, LayoutSummary, TensorPlacement
from rollplex.ir.planned_node import NodeMemory
from rollplex.ir.planned_pool import LASTING, HostPlace, HostPool

Variant = Literal["rollplex", "serial", "apart", "pools", "partial"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
Phase = Literal["P1", "P2", "P3"]

_SERIAL = {
    "decode": "P1 decode",
    "reference": "P2 prefix-reference",
    "score": "P2 score-reference",
    "actor": "P2 prefix-actor",
    "train": "P2 train-actor",
    "update": "P3 update",
    "publish": "P3 publish",
}
_OVERLAPPED = {
    "reference": "P1 prefix-reference",
    "actor": "P1 prefix-actor",
    "decode": "P1 decode",
    "score": "P2 score-reference",
    "train": "P2 train-actor",
    "update": "P3 update",
    "publish": "P3 publish",
}
WINDOWS: dict[Variant, dict[str, str]] = {
    "rollplex": _OVERLAPPED,
    "partial": _OVERLAPPED,
    "serial": _SERIAL,
    "apart": _SERIAL,
    "pools": _SERIAL,
}

# By window, where an object is (H hbm, h host, d dropped, - nowhere) and whether it is used (u); `.` is no such object.
TABLE = """
object              class       bytes start rollplex        serial          apart           more
actor.snapshot      regenerable   336 hbm   HHHHHHH uuu-uuu HHHHHHH u--uuuu HHHHHHH ---uuuu shared
actor.case3         regenerable    36 hbm   HHHHHHH uuu---u HHHHHHH u-----u . .             shared
rollout.weights     regenerable   336 hbm   . .             . .             HHHHHHH u-----u
reference.weights   regenerable   174 host  HhhHhhh u--u--- hHHhhhh -uu---- hHHhhhh -uu---- host_backed
rollout.kv          phase-local  1152 -     HHH---- uuu---- H------ u------ H------ u------
reference.boundary  boundary       16 -     HHHH--- u--u--- -HH---- -uu---- -HH---- -uu---- slots
actor.boundary      boundary       16 -     -HHHH-- -u--u-- ---HH-- ---uu-- ---HH-- ---uu-- slots attached
actor.prefix_saved  phase-local  5236 -     -hhhh-- -u--u-- ---dd-- ---uu-- ---dd-- ---uu-- slots attached recomputable
reference.workspace phase-local     3 -     ---H--- ---u--- --H---- --u---- --H---- --u----
train.activations   phase-local  3938 -     ----H-- ----u-- ----H-- ----u-- ----H-- ----u--
actor.gradients     phase-local   348 -     ----Hh- ----uu- ----Hh- ----uu- ----HH- ----uu-
actor.master        permanent     348 host  hhhhhhh -----u- hhhhhhh -----u- hhhhhHh -----u-
actor.moments       permanent     696 host  hhhhhhh -----u- hhhhhhh -----u- hhhhhHh -----u-
optimizer.workspace phase-local  1648 -     -----H- -----u- -----H- -----u- . .
rollout.carried     permanent      96 host  hhhhhhh u------ . .             . .             partial
"""
PARTIAL = Tail(kind="partial", sampled=4, taken=2, carried="rollout.carried", ends_at_tokens=9.0, snapshots=2)
COLUMN: dict[Variant, int] = {"rollplex": 4, "partial": 4, "serial": 6, "apart": 8, "pools": 8}
PLACES: dict[str, Residency] = {"H": "hbm", "h": "host", "d": "dropped", "-": "-"}


def objects(variant: Variant) -> tuple[PlannedObject, ...]:
    """The rows of the table that a variant has."""
    rows = [line.split() for line in TABLE.strip().splitlines()[1:]]
    there = (row for row in rows if row[COLUMN[variant]] != "." and ("partial" not in row or variant == "partial"))
    return tuple(_object(row, variant) for row in there)


def _object(row: Sequence[str], variant: Variant) -> PlannedObject:
    name, class_, nbytes, start = row[:4]
    places, uses = row[COLUMN[variant] : COLUMN[variant] + 2]
    windows = list(WINDOWS[variant].values())
    used = tuple(w for w, u in zip(windows, uses, strict=True) if u == "u")
    owner, more = name.split(".")[0], row[10:]
    fields: dict[str, Any] = {flag: True for flag in ("host_backed", "attached", "recomputable") if flag in more}
    fields["class"] = class_
    return PlannedObject(
        name=name,
        title=name,
        role="" if "partial" in more else owner if owner == "reference" else "actor",
        process="rollout" if owner == "rollout" else "train",
        readers=("rollout",) if "shared" in more and variant not in ("apart", "pools") else (),
        bytes=int(nbytes) * (2 if "slots" in more and variant == "partial" else 1),
        slots=(4 if variant == "partial" else 2) if "slots" in more else 1,
        start=cast(Residency, start),
        produced="start" if start != "-" else used[0],
        consumed=used,
        residency={w: PLACES[p] for w, p in zip(windows, places, strict=True)},
        **fields,
    )


def windows(variant: Variant) -> tuple[WindowSummary, ...]:
    """Bytes of every window, from the table."""
    pools = [held for _, held in by_pool(variant)]
    return tuple(_window(name, pools) for name in WINDOWS[variant].values())


def by_pool(variant: Variant) -> list[tuple[str, list[PlannedObject]]]:
    """Pools and their objects: all of them together, or those of each process."""
    if variant != "pools":
        return [("gpus", list(objects(variant)))]
    names = {"training": "train", "rollout": "rollout"}
    return [(pool, [o for o in objects(variant) if o.process == process]) for pool, process in names.items()]


def _hbm(held: Sequence[PlannedObject], window: str) -> int:
    return sum(o.bytes for o in held if o.residency[window] == "hbm")


def _host(held: Sequence[PlannedObject], window: str) -> int:
    return sum(o.bytes for o in held if o.host_backed or o.residency[window] == "host")


def _window(name: str, pools: list[list[PlannedObject]]) -> WindowSummary:
    live = {o.name: o.bytes for held in pools for o in held if o.residency[name] == "hbm"}
    return WindowSummary(
        name=name, phase=cast(Phase, name[:2]), seconds=1.0, hbm_bytes=max(_hbm(held, name) for held in pools),
        host_bytes=max(_host(held, name) for held in pools), by_object=live,
    )  # fmt: skip


def _pool(variant: Variant, name: str, held: list[PlannedObject]) -> PoolSummary:
    names = list(WINDOWS[variant].values())
    peak = max(names, key=lambda w: _hbm(held, w))
    return PoolSummary(
        name=name, gpus=4 if variant in ("apart", "pools") else 2, peak_hbm_bytes=_hbm(held, peak),
        peak_window=peak, peak_host_bytes=max(_host(held, w) for w in names),
    )  # fmt: skip


def _times(variant: Variant) -> Times:
    """Seven windows of a second each; decode runs through the three of P1 where prefixes run beside it."""
    beside = variant in ("rollplex", "partial")
    decode, interference = (2.9, 0.1) if beside else (1.0, 0.0)
    known = 1.0 if variant == "partial" else 2.0  # seconds of prefixes that are used
    serial = decode + known + 4.0  # of pools: on all GPUs, which nothing here tells
    return Times(
        decode_s=decode, prefix_s=2.0, interference_s=interference, post_s=4.0, exposed_transfer_s=0.0,
        serial_s=serial, step_s=7.0, speedup_vs_serial=serial / 7.0, saving_bound_s=min(2.0 - interference, decode),
    )  # fmt: skip


def summary(variant: Variant) -> Summary:
    """A summary whose capacities are what the plan needs, to the byte."""
    shown = windows(variant)
    peak, host = max(shown, key=lambda w: w.hbm_bytes), max(w.host_bytes for w in shown)
    return Summary(
        capacity_bytes=peak.hbm_bytes,
        host_capacity_bytes=host,
        peak_hbm_bytes=peak.hbm_bytes,
        peak_window=peak.name,
        peak_host_bytes=host,
        batch_bytes=GPUS.get(variant, (2, {}))[0] * (2 * 9 + 4 * 13),
        node=node_memory(variant),
        pools=tuple(_pool(variant, name, held) for name, held in by_pool(variant)),
        tail=PARTIAL if variant == "partial" else None,
        objects=objects(variant),
        windows=shown,
        layout=layout(variant != "pools", 4 if variant == "apart" else 2),
        host_pool=host_pool(variant),
        chunks=ChunkSummary(
            optimizer=OptimizerChunks(
                count=3, elements=32, bytes=512, workspace_bytes=0 if COLUMN[variant] == 8 else 1648
            ),
            microbatch=Microbatches(
                prefix_prompts=1, suffix_responses=1,
                workspace_bytes={"reference.workspace": 3, "train.activations": 3938},
            ),
        ),
        times=_times(variant),
        policy=Policy(kind="mps" if variant in ("rollplex", "partial") else "none"),
        solvers=(SolverResult(name="residency", status="optimal", objective="peak bytes", value=16.0, bound=16.0),),
        warnings=(),
    )  # fmt: skip


GPUS = {"apart": (4, {"gpus": 4}), "pools": (4, {"training": 4, "rollout": 4})}
"""Prompts of a step, and GPUs by pool; 2 of a step on 2 in all other variants."""


def node_memory(variant: Variant) -> NodeMemory:
    """CPU processes on one node: the pools alone are counted."""
    top = {name: 0 for name, _ in by_pool(variant)}
    for place in host_pool(variant).offsets:
        top[place.pool] = max(top[place.pool], place.offset + place.bytes)
    gpus = GPUS.get(variant, (2, {"gpus": 2}))[1]
    return NodeMemory(
        gpus=gpus, controller=True, capacity_bytes=max(host_pool(variant).bytes, 1) * sum(gpus.values()),
        pinned_bytes=sum(top[pool] * n for pool, n in gpus.items()), process_bytes=0, batch_bytes=0,
    )  # fmt: skip


def host_pool(variant: Variant) -> HostPool:
    """Everything that is ever at the host, one behind the other; but gradients lie where saved state was before."""
    places, top = list[HostPlace](), 0
    pool = {o.name: name for name, held in by_pool(variant) for o in held}
    for o in objects(variant):
        if o.host_backed or "host" in o.residency.values():
            saved = next((p for p in places if p.object == "actor.prefix_saved"), None)
            at = saved.offset if saved and o.name == "actor.gradients" else top
            there = _needing_a_place(variant, o)
            places.append(HostPlace(object=o.name, pool=pool[o.name], offset=at, bytes=o.bytes, windows=there))
            top = max(top, at + o.bytes)
    bound = max(w.host_bytes for w in windows(variant))
    status = "optimal" if bound == top else "feasible"
    return HostPool(bytes=top, bound_bytes=bound, status=status, offsets=tuple(places))


def _needing_a_place(variant: Variant, o: PlannedObject) -> tuple[str, ...]:
    """All windows, or those in which it is at the host and the one at whose end it gets there."""
    names = tuple(WINDOWS[variant].values())
    if o.class_ in LASTING:
        return names
    there = [names.index(w) for w, place in o.residency.items() if place == "host"]
    begins = there[0] if o.produced == names[there[0]] else there[0] - 1
    return names[begins : there[-1] + 1]


# Name, view, case, tensors, parameters (those of tinyjob.CONFIG in all), bytes of shard, received, buffer; group, slabs
CLASSES = """
embed   alias     1 1 128 256 128 0  2 1
qkv     rebuild   3 6 18  36  18  36 2 1
o       transpose 2 1 4   8   4   0  2 1
gate_up slabs     1 2 8   16  8   0  2 2
down    transpose 2 1 4   8   4   0  2 1
norm    alias     1 3 6   12  0   0  1 1
"""
REINDEXED = {"1": 160, "2": 8, "3": 0}
"""Parameters by case where q, k and v are read in the trainer's order."""
CASE_OF = {"o_proj": 2, "down_proj": 2, "q_proj": 3, "k_proj": 3, "v_proj": 3}


def _tensor(name: str) -> TensorPlacement:
    case = next((case for part, case in CASE_OF.items() if part in name), 1)
    return TensorPlacement(
        name=name, case=cast(Any, case), slabs=2 if "gate_proj" in name or "up_proj" in name else 1, why=""
    )


def _reindexed() -> LayoutAlternative:
    cases = {k: CaseBytes(params=n, bytes=2 * n) for k, n in REINDEXED.items()}
    return LayoutAlternative(order="reindex", cases=cases, case3_buffer_bytes=0, seconds=0.0)


def layout(shared: bool, gpus: int = 2) -> LayoutSummary:
    """TP 2 -> TP 1: two engines of one rank, one class of tensors in each case; none where nothing is shared."""
    rows = [line.split() for line in CLASSES.strip().splitlines()] if shared else []
    params = {k: sum(int(row[4]) for row in rows if row[2] == k) for k in "123"}
    classes = tuple(
        LayoutClass.model_validate(
            {"name": name, "view": view, "case": int(case), "tensors": int(count), "params": int(params)}
            | {"shard_bytes": int(shard), "receives_bytes": int(gets), "sends_bytes": int(gets), "why": name}
            | {"buffer_bytes": int(buffer), "group": int(group), "slabs": int(slabs), "pieces": 1}
            | {"decode_s": 0.0, "rebuild_s": 0.0}
        )
        for name, view, case, count, params, shard, gets, buffer, group, slabs in rows
    )
    return LayoutSummary(
        q=2 if shared else 0,
        order="stock",
        cases={k: CaseBytes(params=n, bytes=2 * n) for k, n in params.items()},
        case3_buffer_bytes=36 if shared else 0,
        exchange_bytes_per_gpu=162 if shared else 336,
        exchange_s=1.0,
        placement={f"engine {e}": (e,) for e in range(2 if shared else 4)},
        groups=gpus // 2 if shared else 1,
        classes=classes,
        needs=(),
        alternatives=(_reindexed(),) if shared else (),
        tensors=tuple(_tensor(t.name) for t in (MODEL.tensors() if shared else ())),
    )
