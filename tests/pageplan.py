"""A plan by hand for tests of what is printed: its figures are easy to check by eye, its programs are empty.

capacity 10 GiB          P1 prefix-ref   P1 decode   P2 train   P3 update
actor snapshot     4     hbm*            hbm*        hbm*       hbm*
reference weights  2     hbm*            host        host       host
boundary KV        1     hbm+            hbm         hbm*       -
moments            8     host            host        host       host*
activations        3     -               -           hbm+       -
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rollplex.ir.plan import (
    ChunkSummary,
    Infeasible,
    Microbatches,
    NodeRecord,
    OptimizerChunks,
    Plan,
    PlannedObject,
    Policy,
    PoolSummary,
    ProcessKind,
    Residency,
    SolverResult,
    Summary,
    Times,
    WindowSummary,
)
from rollplex.ir.planned_layout import CaseBytes, LayoutSummary
from rollplex.ir.planned_node import NodeMemory
from rollplex.ir.planned_pool import HostPool

GIB = 2**30
WINDOWS = ("P1 prefix-ref", "P1 decode", "P2 train", "P3 update")
SHORT: Mapping[str, Residency] = {"h": "hbm", "s": "host", "d": "dropped", "-": "-"}

JOB: dict[str, Any] = {
    "model": {"name": "Qwen2.5-VL-7B"},
    "cluster": {"gpu": "H800", "gpus_per_node": 8, "host_memory_gb": 1400},
    "roles": {
        "actor": {"train": {"tensor_parallel": 4}, "rollout": {"tensor_parallel": 2, "kv_cache_gib": 8}},
        "reference": {"score": {"tensor_parallel": 4}},
    },
    "workload": {"prompts": 16, "group": 8, "prompt_tokens": 4096, "response_tokens": 1024},
}


def planned(name: str, gib: float, places: str, used: str = "", made: str = "start", **changes: Any) -> PlannedObject:
    """An object from a letter a window (h s d -) and the numbers of the windows that use it."""
    fields: dict[str, Any] = {
        "name": name,
        "title": name.replace(".", " "),
        "class": "phase-local",
        "role": name.partition(".")[0],
        "process": "train",
        "bytes": round(gib * GIB),
        "start": SHORT[places[0]],
        "produced": made,
        "consumed": tuple(WINDOWS[int(i)] for i in used),
        "residency": {w: SHORT[p] for w, p in zip(WINDOWS, places, strict=True)},
    }
    return PlannedObject(**{**fields, **changes})


OBJECTS = (
    planned("actor.snapshot", 4, "hhhh", "0123", **{"class": "regenerable"}),
    planned("reference.weights", 2, "hsss", "0", host_backed=True, **{"class": "regenerable"}),
    planned("actor.boundary", 1, "hhh-", "2", WINDOWS[0], attached=True, **{"class": "boundary"}),
    planned("actor.moments", 8, "ssss", "3", **{"class": "permanent"}),
    planned("train.activations", 3, "--h-", "", WINDOWS[2]),
)

GRAPH = (
    NodeRecord(name="prompts", op="input", loc="tiny.py:1", phase="P1"),
    NodeRecord(
        name="rollout",
        op="rx.generate",
        args=("actor", {"ref": "prompts"}),
        kwargs={"n": 8},
        loc="tiny.py:2",
        phase="P1",
    ),
    NodeRecord(name="kv", op="rx.prefix", args=("actor", {"ref": "prompts"}), loc="tiny.py:3", phase="P1"),
    NodeRecord(
        name="logp", op="rx.suffix", args=("actor", {"ref": "kv"}, {"ref": "rollout"}), loc="tiny.py:3", phase="P2"
    ),
    NodeRecord(name="old", op="rx.field", args=({"ref": "rollout"}, "logprobs"), loc="tiny.py:4", phase="P2"),
    NodeRecord(name="sub", op="operator.sub", args=({"ref": "logp"}, {"ref": "old"}), loc="tiny.py:4", phase="P2"),
    NodeRecord(name="ratio", op="torch.exp", args=({"ref": "sub"},), loc="tiny.py:4", phase="P2"),
    NodeRecord(name="neg", op="operator.neg", args=({"ref": "ratio"},), loc="tiny.py:5", phase="P2"),
    NodeRecord(name="mask", op="rx.field", args=({"ref": "rollout"}, "mask"), loc="tiny.py:5", phase="P2"),
    NodeRecord(name="loss", op="rx.masked_mean", args=({"ref": "neg"}, {"ref": "mask"}), loc="tiny.py:5", phase="P2"),
    NodeRecord(name="update", op="rx.update", args=("actor", {"ref": "loss"}), loc="tiny.py:6", phase="P3"),
)


def window(name: str, objects: Sequence[PlannedObject], seconds: float = 1.5) -> WindowSummary:
    """What a GPU holds in a window, from the objects' residency."""
    held = {o.name: o.bytes for o in objects if o.residency.get(name) == "hbm"}
    host = sum(o.bytes for o in objects if o.host_backed or o.residency.get(name) == "host")
    phase = name.partition(" ")[0]
    return WindowSummary.model_validate(
        {"name": name, "phase": phase, "seconds": seconds, "hbm_bytes": sum(held.values()), "host_bytes": host}
        | {"by_object": held}
    )


def summary(
    objects: Sequence[PlannedObject] = OBJECTS, windows: Sequence[str] = WINDOWS, capacity: int = 10 * GIB
) -> Summary:
    """The summary of these objects over these windows."""
    filled = tuple(window(name, objects) for name in windows)
    peak = max(filled, key=lambda w: w.hbm_bytes)
    return Summary(
        capacity_bytes=capacity,
        host_capacity_bytes=64 * GIB,
        peak_hbm_bytes=peak.hbm_bytes,
        peak_window=peak.name,
        peak_host_bytes=max(w.host_bytes for w in filled),
        batch_bytes=3 * GIB,
        node=NodeMemory(
            gpus={"gpus": 8}, controller=True, capacity_bytes=800 * GIB, pinned_bytes=0, process_bytes=20 * GIB,
            batch_bytes=15 * GIB,
        ),
        pools=(
            PoolSummary(
                name="gpus", gpus=8, peak_hbm_bytes=peak.hbm_bytes, peak_window=peak.name,
                peak_host_bytes=max(w.host_bytes for w in filled),
            ),
        ),
        objects=tuple(objects),
        windows=filled,
        layout=LayoutSummary(
            q=2,
            order="stock",
            cases={
                "1": CaseBytes(params=600, bytes=1200),
                "2": CaseBytes(params=300, bytes=600),
                "3": CaseBytes(params=100, bytes=200),
            },
            case3_buffer_bytes=GIB // 4,
            exchange_bytes_per_gpu=3 * GIB // 2,
            exchange_s=0.01,
            placement={"engine 0": (0, 2), "engine 1": (1, 3)},
            groups=1,
            classes=(),
            needs=("megatron: gate_up as two parameters",),
            alternatives=(),
            tensors=(),
        ),
        host_pool=HostPool(bytes=0, bound_bytes=0, status="optimal", offsets=()),
        chunks=ChunkSummary(
            optimizer=OptimizerChunks(count=5, elements=1000, bytes=GIB, workspace_bytes=3 * GIB),
            microbatch=Microbatches(prefix_prompts=1, suffix_responses=4, workspace_bytes={}),
        ),
        times=Times(
            decode_s=60, prefix_s=20, interference_s=1, post_s=50, exposed_transfer_s=0.5,
            serial_s=130, step_s=111.5, speedup_vs_serial=1.1659, saving_bound_s=19,
        ),
        policy=Policy(kind="mps", why="either side may take what the other leaves idle"),
        solvers=(
            SolverResult(name="residency", status="optimal", objective="exposed seconds", value=0.5, bound=0.5),
            SolverResult(name="residency", status="feasible", objective="peak bytes", value=8 * GIB, bound=7 * GIB),
        ),
        warnings=("reference weights return to HBM once a step",),
    )  # fmt: skip


def plan(found: Summary | None = None, infeasible: Infeasible | None = None, **changes: Any) -> Plan:
    """A whole plan around a summary."""
    fields: dict[str, Any] = {
        "feasible": infeasible is None,
        "schedule": "rollplex",
        "algorithm": "tiny.py:tiny",
        "job": JOB,
        "graph": GRAPH,
        "summary": found or summary(),
        "infeasible": infeasible,
        "processes": {
            "controller": ProcessKind(engine="controller", ranks=1),
            "train": ProcessKind(engine="host", pool="gpus", ranks=8, tensor_parallel=4, data_parallel=2),
            "rollout": ProcessKind(engine="host", pool="gpus", ranks=8, tensor_parallel=2, data_parallel=4),
        },
        "programs": {"controller": (), "train": (), "rollout": ()},
    }
    return Plan(**{**fields, **changes})
