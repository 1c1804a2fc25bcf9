"""Edits that do no harm, each with its reason; decided from the good plan and the edit alone, never from a verdict.

FREE     fields that nothing rests on, by their reason: the whole list, which docs/plan.md prints
SETS     lists whose order says nothing
Steps may change places where neither matters to the other, and carry another window where windows do not matter.
"""

from __future__ import annotations

import re
from typing import Any

from mutants.everywhere import Edit

FREE: dict[str, str] = {
    "text for people": r"""algorithm
graph\.\*\.loc
summary\.objects\.\*\.(title|why)
summary\.policy\.why
summary\.warnings(\.\*)?
summary\.layout\.(classes|tensors)\.\*\.(why|needs)
summary\.solvers\.\*\.(name|objective)
summary\.runners_up\.\*\.why_not
infeasible\.remedies\.\*\.shrinks(\.\*)?""",
    "predicted seconds": r"""summary\.layout\.(exchange_s|between_nodes_bytes)
summary\.layout\.classes\.\*\.(decode_s|rebuild_s)
summary\.layout\.alternatives\.\*\.seconds
summary\.times\.hidden_offload_s
summary\.tail\.(ends_at_tokens|snapshots)""",
    "most that a GPU sends: the engines' row orders say": r"""summary\.layout\.classes\.\*\.sends_bytes""",
    "figures of other compilations": r"""summary\.runners_up(\.\*(\.(peak_bytes|step_s))?)?
infeasible\.remedies\.\*\.(change|frees_bytes|costs_s|costs_share|verified)
infeasible\.remedies(\.\*)?
summary\.times\.streamed_s""",
    "read by a run or a solver, not by a plan": r"""job\.run(\..*)?
job\.solver\..*
job\.optimizer\.(kind|lr|betas(\.\*)?|eps|weight_decay|no_decay(\.\*)?|clip_norm)
job\.algorithm(\..*)?""",
    "the job's predicted seconds rest on it": r"""job\.cluster\.(internode_gb_s|gpu)
job\.workload\.(prompt_median|response_median)
job\.workload\.dynamic_sampling\.kept""",
    "the job's, without effect beside its other keys": r"""job\.cluster\.(rollout_gpus|pinned_share)
job\.cluster\.(context_gib|nccl_gib|process_host_gib)
job\.model\.name
job\.workload\.(prompt_tokens|response_tokens|frames|max_pixels|turns\.frames)
job\.workload\.rollout\.(share|factor)
job\.optimizer(\.(chunks|in_flight|snapshot))?
job\.roles\.\*\.(recompute|attention|prefix_saved|head|model)
job\.roles\.\*\.\w+\.(data_parallel|make_vocab_size_divisible_by|sequence_parallel|distributed_optimizer)
job\.roles\.\*\.\w+\.(zero|microbatch|offload_parameters|offload_optimizer)
job\.roles\.\*\.rollout\.(kv_cache_gib|runtime_gib|max_model_len|max_num_batched_tokens|max_num_seqs)
job\.roles\.\*\.rollout\.(mm_encoder_tp_mode|gpu_memory_utilization)
job\.sharing\.(kind|share)
job\.model\.config(\..*)?""",
}
SETS = r"""programs\..*\.(reads|writes|streams|inputs|carries)\.\*
summary\.objects\.\*(\.(readers|consumed)\.\*)?
summary\.(solvers|pools)\.\*
summary\.layout\.(classes|tensors|alternatives)\.\*
summary\.host_pool\.offsets\.\*(\.windows\.\*)?
summary\.(warnings|runners_up)\.\*
infeasible\.remedies\.\*
processes\..*\.(distributed_optimizer|fully_sharded)\.\*
not_executable\.\*
job\..*"""


def _is(patterns: str, place: str) -> bool:
    return any(re.fullmatch(pattern, place) for pattern in patterns.split("\n"))


def reason(plan: dict[str, Any], edit: Edit) -> str:
    """Why an edit does no harm; empty where it does some."""
    if edit.how == "swap" and _is(SETS, edit.pattern):
        return "order of a set"
    if edit.how == "delete" and edit.pattern == "summary.solvers.*":
        return "one report fewer"
    if edit.pattern.startswith("programs.") and isinstance(edit.path[-1], int) and len(edit.path) == 3:
        return _steps(plan, edit) if edit.how == "swap" else ""
    for why, patterns in FREE.items():
        if _is(patterns, edit.pattern):
            return why
    return _special(plan, edit)


# ---- steps


MEETINGS = ("barrier", "exchange", "publish")


def _steps(plan: dict[str, Any], edit: Edit) -> str:
    """Neighbours of one window that neither meet anybody, nor touch the same object, nor hand each other a value."""
    program, i = plan["programs"][edit.path[1]], int(edit.path[2])
    a, b = program[i], program[i + 1]
    if a["window"] != b["window"]:
        return ""
    kinds = {a["kind"], b["kind"]}
    if a["kind"] == "signal" and a["event"].endswith("]"):
        return "a group's value that is sent a step later"
    if kinds == {"wait", "run"}:
        wait, run = (a, b) if a["kind"] == "wait" else (b, a)
        return "" if wait["event"] in run["inputs"] else "a wait for what the step beside it does not take"
    if "wait" in kinds:
        return {"wait": "two waits", "barrier": "a value that comes before or behind a barrier"}.get(
            next(iter(kinds - {"wait"}), "wait"), "a wait and a move" if kinds & {"map", "fetch", "exchange"} else ""
        )
    if "barrier" in kinds and any(s["kind"] == "unmap" and s["imported"] for s in (a, b)):
        return "a reader that lets go before or behind a barrier"
    if "barrier" in kinds and kinds - {"barrier"} <= {"unmap", "offload", "drop"}:
        return "" if _readers(plan, a, b) else "pages of its own, let go before or behind a barrier"
    if kinds == {"signal", "map"} and any(s["kind"] == "map" and s["imported"] for s in (a, b)):
        return "pages of its peers, mapped before or behind a signal to its readers"
    if any(s["kind"] in ("barrier", "signal") for s in (a, b)):
        return ""
    if kinds == {"rebuild", "export"}:
        return "a copy that is made of pages already handed out"
    if a["kind"] == b["kind"] == "run":
        return "two prompt groups" if _groups_apart(a, b) else "two turns of a group" if _turns_apart(a, b) else ""
    return "" if _named(a) & _named(b) else "nothing in common"


def _readers(plan: dict[str, Any], *steps: dict[str, Any]) -> bool:
    names = {s.get("object") for s in steps}
    return any(o["readers"] for o in plan["summary"]["objects"] if o["name"] in names)


def _groups_apart(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return "grad_norm" not in (a["task"], b["task"]) and a["microbatch"] != b["microbatch"]


def _turns_apart(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Suffixes of two turns of a role: each reads its own responses, and what no suffix changes."""
    return a["task"] == b["task"] in ("suffix", "train") and a["role"] == b["role"]


def _named(step: dict[str, Any]) -> set[str]:
    lists = (step.get(field, ()) for field in ("reads", "writes", "streams"))
    return {name for names in lists for name in names} | ({step["object"]} if "object" in step else set())


# ---- single places


def _special(plan: dict[str, Any], edit: Edit) -> str:
    """Fields that matter for some objects and not for others."""
    if edit.pattern.startswith("summary.objects.*."):
        return _object(plan["summary"]["objects"][edit.path[2]], edit)
    if edit.pattern == "graph.*.kwargs.*" and edit.how == "delete" and edit.path[-1] == "returns":
        return "the default, spelled out" if plan["graph"][edit.path[1]]["kwargs"]["returns"] == "scores" else ""
    if edit.pattern == "graph.*.kwargs" and edit.how == "delete":
        only = plan["graph"][edit.path[1]]["kwargs"] == {"returns": "scores"}
        return "the default, spelled out" if only else ""
    if edit.pattern == "not_executable.*" and edit.how == "longer":
        return "what stands behind a reason's colon" if ":" in plan["not_executable"][edit.path[1]] else ""
    if edit.pattern.endswith("run:grad_norm.outputs.*"):
        return "name of the norm, which no step takes"
    if re.fullmatch(r"programs\.(controller|rollout)\..*\.window", edit.pattern):
        return _label(plan, edit)
    if edit.pattern == "programs.train.wait.window":
        return _label(plan, edit)
    if edit.pattern == "graph.*.args.*" and plan["graph"][edit.path[1]]["op"] == "rx.host":
        return "arguments of a host function: the algorithm is the user's" if edit.how in ("repeat", "swap") else ""
    if edit.pattern == "graph.*" and edit.how == "swap":
        first, second = plan["graph"][edit.path[1]], plan["graph"][int(edit.path[1]) + 1]
        apart = {"ref": first["name"]} not in [*second["args"], *second["kwargs"].values()]
        lists = [[r["name"] for r in loss[part]] for loss in plan["losses"].values() for part in ("step", "group")]
        together = any(first["name"] in found and second["name"] in found for found in lists)
        return "two records, neither made of the other" if apart and not together else ""
    if edit.pattern == "infeasible.objects.*" and edit.how == "swap":
        listed, i = plan["infeasible"]["objects"], int(edit.path[2])
        return "two objects of one size" if listed[i]["bytes"] == listed[i + 1]["bytes"] else ""
    if edit.pattern == "summary.layout.classes.*.group":
        own = plan["summary"]["layout"]["classes"][edit.path[3]]
        return "" if own["receives_bytes"] else "a group that nothing is gathered in"
    if edit.pattern == "summary.layout.classes.*.view":
        was = plan["summary"]["layout"]["classes"][edit.path[3]]["view"]
        return "two names for whole slabs" if {was, edit.value} == {"alias", "slabs"} else ""
    if edit.pattern.endswith("_s") and 0 < abs(_at(plan, edit) - (edit.value or 0.0)) < ROUNDED_S:
        return "seconds less than those that the rounding of a sum may be off by"
    if edit.pattern == "summary.times.interference_s":
        t = plan["summary"]["times"]
        hidden = t["decode_s"] + (edit.value or 0.0) <= t["prefix_s"] or t["prefix_s"] < 1e-9
        return "decode is shorter than the prefixes beside it" if hidden else ""
    return ""


ROUNDED_S = 1e-4


def _at(plan: dict[str, Any], edit: Edit) -> float:
    """The number at the place of an edit; zero where there is none."""
    inner: Any = plan
    for key in edit.path:
        inner = inner[key]
    return inner if isinstance(inner, int | float) else 0.0


def _label(plan: dict[str, Any], edit: Edit) -> str:
    """The window of a step that moves and uses nothing, or that another program's windows are not told by."""
    phase = {w["name"]: w["phase"] for w in plan["summary"]["windows"]}
    program, i = plan["programs"][edit.path[1]], int(edit.path[2])
    step, before = program[i], program[max(0, i - 1)]["window"]
    same = phase.get(edit.value) in (phase[step["window"]], phase[before] if step["kind"] == "wait" else "")
    return "a window's name where no bytes are counted by it" if same else ""


def _object(o: dict[str, Any], edit: Edit) -> str:
    field = edit.pattern.removeprefix("summary.objects.*.")
    workspace = o["class"] == "phase-local" and not o["attached"] and not o["name"].endswith(".gradients")
    if field == "role" and (workspace or o["role"] == ""):
        return "role of a workspace"
    if field == "role" and o["name"].endswith(".vision"):
        return "role of a frozen tower, which several read"
    if field == "recomputable" and "dropped" not in o["residency"].values():
        return "kept: it is never made again" if o["recomputable"] else ""
    if field == "consumed.*":
        return "a window that it is held for, used or not"
    return ""
