"""Figure 8 of the paper at small scale: what the compiler says of each ablation, and where it really dies.

    python -m benchmarks.ablations        a minute on two cores

A device is chosen on which the full schedule fits and no ablation does. The compiler names the first window over
capacity; the plan is then executed all the same, by real processes, and the arena's own budget has to refuse it there.
`short` is what the whole window lacks, `met` what the object at hand lacked: others would have come behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.grpo import grpo
from examples.shapes.make import make
from rollplex.ir.errors import OutOfMemory
from rollplex.ir.job import Job
from rollplex.ir.plan import Plan
from rollplex.ir.steps import Drop, Fetch, Map, MapPart, Offload, Step, Unmap, UnmapPart
from rollplex.passes.pipeline import compile_plan
from rollplex.runtime.run import execute_plan

MECHANISMS = ("state_offload", "rollout_release", "chunked_optimizer", "weight_sharing")
NAMES = ("full", *MECHANISMS, "naive")
CAPACITY_KIB = 2040
OF_MEGATRON = NAMES[:4]
"""Without weight sharing, and with `naive`, there is a second copy, which the host trainer alone can write."""
TRAINERS: dict[str, tuple[int, tuple[str, ...]]] = {"host": (CAPACITY_KIB, NAMES), "megatron": (2060, OF_MEGATRON)}
"""Device memory in KiB and schedules, by trainer: its own workspaces decide what fits."""
TEXT: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "tie_word_embeddings": False,
    "image_token_id": 262, "video_token_id": 263, "vision_start_token_id": 259, "vision_end_token_id": 260,
    "hidden_size": 32, "vocab_size": 264, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 258,
    "rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
}  # fmt: skip
VISION: dict[str, Any] = {
    "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 40, "num_heads": 2,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 56, "out_hidden_size": 32,
    "fullatt_block_indexes": [1], "tokens_per_second": 4,
}  # fmt: skip


@dataclass(frozen=True)
class Death:
    """Where a run ended for want of memory, and by how many bytes the object at hand was over."""

    process: str
    window: str
    object: str
    nbytes: int


def small_job(folder: Path, name: str, capacity_kib: int = CAPACITY_KIB, trainer: str = "host") -> Job:
    """The job of one row; `folder` receives the clips, made once."""
    if not (folder / "train.jsonl").exists():
        make(folder, videos=4, heldout=1, seed=0)
        (folder / "config.json").write_text(json.dumps({**TEXT, "vision_config": VISION}))
    rollout = {"engine": "host", "kv_cache_gib": "80 KiB", "runtime_gib": "72 KiB"}
    return Job.model_validate({
        "model": {"name": str(folder), "dtype": "float32", "config": {**TEXT, "vision_config": VISION}},
        "cluster": {"gpu": "cpu", "gpus_per_node": 1, "host_memory_gb": 4, "capacity_gib": f"{capacity_kib} KiB"},
        "roles": {
            "actor": {"train": {"engine": trainer}, "recompute": "full", "rollout": rollout},
            "reference": {"score": {"engine": trainer}},
        },
        "workload": {
            "prompts": 2, "group": 2, "prompt_tokens": 96, "response_tokens": 6, "frames": 2, "max_pixels": 7056,
        },
        "schedule": "naive" if name == "naive" else "rollplex",
        "ablate": [name] if name in MECHANISMS else [],
        "optimizer": {"lr": 1e-3},
        "run": {"data": str(folder / "train.jsonl"), "steps": 2, "silent_s": 20},
    })  # fmt: skip


def luck(tokens: list[int]) -> float:
    """A reward that is different for almost every response."""
    return sum(tokens) % 7 / 7


# ---- what the plan says of who dies


def may_die(plan: Plan) -> set[str]:
    """Process kinds whose object can be the one that is over, in the first window over capacity.

    Processes enter a window side by side: one of two dies in every order of their steps, or now this and now that.
    """
    assert plan.infeasible is not None, "a plan that fits"
    entering = {kind: list(_sums(plan, kind, plan.infeasible.window)) for kind in plan.programs}
    found = set()
    for kind, sums in entering.items():
        others = [s for other, theirs in entering.items() if other != kind for s in theirs] or [0]
        crossing = ((a + o, b + o) for a, b in pairwise(sums) for o in others)
        if any(a <= plan.summary.capacity_bytes < b for a, b in crossing):
            found.add(kind)
    return found


def _sums(plan: Plan, kind: str, window: str) -> Iterator[int]:
    """Bytes that a process holds after each step that gives it pages, up to the end of a window's entry."""
    nbytes = {o.name: o.bytes for o in plan.summary.objects}
    start = [o.bytes for o in plan.summary.objects if o.process == kind and o.start == "hbm"]
    if window == plan.summary.windows[0].name:  # what is there from the start is taken in its name
        yield from accumulate(start, initial=0)
    held = sum(start)
    for step in plan.programs[kind]:
        if step.window == window:
            break
        held += _change(step, nbytes)
    for step in (s for s in plan.programs[kind] if s.window == window):
        yield held
        if isinstance(step, Unmap | Offload | Drop):
            return
        held += _change(step, nbytes)
    yield held


def _change(step: Step, nbytes: dict[str, int]) -> int:
    match step:
        case Map(object=name, imported=False) | Fetch(object=name):
            return nbytes[name]
        case Unmap(object=name, imported=False) | Offload(object=name) | Drop(object=name):
            return -nbytes[name]
        case MapPart(start=start, stop=stop):
            return stop - start
        case UnmapPart(start=start, stop=stop):
            return start - stop
        case _:
            return 0


# ---- what really happens


def executed(plan: Plan, out_dir: Path) -> Death | None:
    """Run a plan, checked or not; where it died for want of memory, None if it did not."""
    try:
        execute_plan(plan, hosts={"reward": luck}, out_dir=out_dir)
    except OutOfMemory as error:
        return death(str(error.problems[0].where), error.problems[0].what)
    return None


def death(where: str, what: str) -> Death:
    """A message of the arenas, taken apart; `where` begins with the process."""
    text = f"{where}: {what}"
    found = {
        "process": re.match(r"\w+ \d+", text),
        "window": re.search(r"window ([^,:]+?)(?:,|:|$)", text),
        "object": re.search(r"(\S+) asks for", text),
        "nbytes": re.search(r"\((\d+) bytes\) too many", text),
    }
    process, window, name, nbytes = (m[m.lastindex or 0] if m else "" for m in found.values())
    return Death(process, window, name, int(nbytes or 0))


def row(name: str, plan: Plan, died: Death | None) -> str:
    """One line of the table."""
    said = plan.infeasible
    told = f"{said.window} ({', '.join(sorted(may_die(plan)))})" if said else "fits"
    short = f"{said.shortfall_bytes / 1024:8.0f}" if said else " " * 8
    if died is None:
        return f"{name:<18} {told:<38} {'ran, 2 steps':<30} {'':<20} {short}"
    what = f"{died.window} ({died.process})"
    return f"{name:<18} {told:<38} {what:<30} {died.object:<20} {short} {died.nbytes / 1024:6.0f}"


def main() -> int:
    """Print a table for each trainer; status 1 where a run did not end as the compiler said."""
    with TemporaryDirectory() as folder:
        wrong = sum(table(Path(folder), trainer) for trainer in TRAINERS)
    schedules = sum(len(names) for _, names in TRAINERS.values())
    print(f"{schedules} schedules, {wrong} that did not end as the compiler said")
    return int(wrong > 0)


def table(folder: Path, trainer: str) -> int:
    """Print what becomes of each schedule; how many did not end as the compiler said."""
    (capacity_kib, names), wrong = TRAINERS[trainer], 0
    head = f"{'':<18} {'compiler: first window over (who)':<38} {'run: died in':<30} {'object':<20}"
    print(f"{trainer} trains, {capacity_kib} KiB of device memory\n{head} short KiB  met")
    for name in names:
        plan = compile_plan(grpo, small_job(folder, name, capacity_kib, trainer))
        died = executed(plan, folder / f"run-{trainer}-{name}")
        wrong += (plan.infeasible and plan.infeasible.window) != (died and died.window)
        print(row(name, plan, died), flush=True)
    return wrong


if __name__ == "__main__":
    raise SystemExit(main())
