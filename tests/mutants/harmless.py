"""Edits that do no harm, each with its reason; decided from the good plan and the edit alone, never from a verdict.

FREE_TEXT     words for people: titles, reasons, lines of source      ORDER     the order of a set or of a table
PREDICTED     figures that no step and no other figure rests on       INPUT     what the user asked for; it is the job
Steps may change places where neither matters to the other, and carry another window where windows do not matter.
"""

from __future__ import annotations

import re
from typing import Any

from mutants.everywhere import Edit

FREE_TEXT = r"""algorithm
graph\.\*\.loc
summary\.objects\.\*\.(title|why)
summary\.policy\.why
summary\.warnings\.\*
summary\.layout\.(classes|tensors)\.\*\.(why|needs)
summary\.layout\.classes\.\*\.name
summary\.layout\.needs\.\*
summary\.solvers\.\*\.(name|objective)
infeasible\.remedies\.\*\.shrinks\.\*
not_executable\.\*"""
PREDICTED = r"""summary\.layout\.(between_nodes_bytes|groups)
summary\.layout\.classes\.\*\.(tensors|slabs|pieces|shard_bytes|sends_bytes|decode_s|rebuild_s)
summary\.layout\.tensors\.\*\.slabs
summary\.layout\.alternatives\..*
summary\.tail\..*
infeasible\.remedies\.\*\.(frees_bytes|costs_s|costs_share|verified)
infeasible\.remedies\.\*"""
INPUT = r"""job\.(optimizer|solver|run|algorithm|layout|ablate)(\..*)?
job\.cluster\.(internode_gb_s|context_gib|nccl_gib|gpu)
job\.workload\.(prompt_tokens|response_tokens|prompt_median|response_median|frames|turns\.frames|max_pixels|rollout\..*)
job\.roles\.\w+\.(recompute|prefix_saved|attention|lora|freeze)(\..*)?
job\.roles\.\w+\.\w+\.(sequence_parallel|distributed_optimizer|data_parallel|runtime_gib|kv_cache_gib)
job\.roles\.\w+\.\w+\.(make_vocab_size_divisible_by|max_model_len|max_num_batched_tokens|max_num_seqs)
job\.roles\.\w+\.\w+\.(gpu_memory_utilization|microbatch|zero|vision_tower.*|encoder.*)
job\.sharing\.kind
job\.model\..*"""
SETS = r"""programs\..*\.(reads|writes|streams|inputs|carries)\.\*
summary\.objects\.\*(\.(readers|consumed)\.\*)?
summary\.(solvers|pools)\.\*
summary\.layout\.(classes|tensors)\.\*
summary\.host_pool\.offsets\.\*(\.windows\.\*)?
summary\.warnings\.\*
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
    if _is(FREE_TEXT, edit.pattern):
        return "free text" if edit.pattern != "not_executable.*" or len(plan["not_executable"]) > 1 else ""
    for name, patterns in (("predicted, nothing rests on it", PREDICTED), ("the job is the user's", INPUT)):
        if _is(patterns, edit.pattern):
            return name
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
    if "wait" in kinds:
        return {"wait": "two waits", "barrier": "a value that comes before or behind a barrier"}.get(
            next(iter(kinds - {"wait"}), "wait"), "a wait and a move" if kinds & {"map", "fetch"} else ""
        )
    if "barrier" in kinds and kinds - {"barrier"} <= {"unmap", "offload", "drop"}:
        return "" if _readers(plan, a, b) else "pages of its own, let go before or behind a barrier"
    if any(s["kind"] in ("barrier", "signal") for s in (a, b)):
        return ""
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
    if edit.pattern == "summary.layout.classes.*.view":
        was = plan["summary"]["layout"]["classes"][edit.path[3]]["view"]
        return "two names for whole slabs" if {was, edit.value} == {"alias", "slabs"} else ""
    if edit.pattern == "summary.times.interference_s":
        t = plan["summary"]["times"]
        hidden = t["prefix_s"] - t["interference_s"] - 1 > t["decode_s"] or t["prefix_s"] < 1e-9
        return "decode is shorter than the prefixes beside it" if hidden else ""
    return ""


def _label(plan: dict[str, Any], edit: Edit) -> str:
    """The window of a step that moves and uses nothing, or that another program's windows are not told by."""
    phase = {w["name"]: w["phase"] for w in plan["summary"]["windows"]}
    step = plan["programs"][edit.path[1]][edit.path[2]]
    same = phase.get(edit.value) == phase[step["window"]]
    return "a window's name where no bytes are counted by it" if same else ""


def _object(o: dict[str, Any], edit: Edit) -> str:
    field = edit.pattern.removeprefix("summary.objects.*.")
    workspace = o["class"] == "phase-local" and not o["attached"] and not o["name"].endswith(".gradients")
    if field == "role" and (workspace or o["role"] == ""):
        return "role of a workspace"
    if field == "recomputable" and "dropped" not in o["residency"].values():
        return "kept: it is never made again" if o["recomputable"] else ""
    if field == "consumed.*":
        return "a window that it is held for, used or not"
    return ""
