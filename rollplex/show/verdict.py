"""Why a plan does not fit, and what would make it fit; and the naive overlap as the paper's Table 1 has it."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from rollplex.ir.job import Job
from rollplex.ir.plan import Infeasible, Plan, PlannedObject, Remedy, Resource
from rollplex.ir.planned_job import job_of
from rollplex.ir.planned_node import NODE_TITLES
from rollplex.show.text import LABEL, WIDTH, clip, joined, labelled, line, seconds, size, table, unit_for

NOT_IN_PAPER = {
    "vision tower": "towers",
    "CUDA context": "contexts",
    "CUDA context, NCCL": "contexts",
}
"""Rows that the paper's Table 1 leaves out, and what to call them together."""
_PAPER = ("BF16 weights", "gradients", "master", "moments", "activations", "prefix KV", "KV cache", "buffers")


def infeasible_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """The first window over capacity, what is live in it by size, and the changes that help; empty when it fits."""
    found = plan.infeasible
    if found is None:
        return []
    return [
        *_shortfall(plan, found, width),
        *_also(plan, found, width),
        *_live(plan, found, width),
        *_remedies(found, width),
    ]


HAS: dict[Resource, str] = {
    "hbm": "a GPU has",
    "host": "a GPU's share of pinned host memory is",
    "node": "the host memory of a node is",
}


def capacity_of(plan: Plan, resource: Resource) -> int:
    """Bytes that there are of a resource."""
    s = plan.summary
    return {"hbm": s.capacity_bytes, "host": s.host_capacity_bytes, "node": s.node.capacity_bytes}[resource]


def _shortfall(plan: Plan, found: Infeasible, width: int) -> list[Text]:
    capacity = capacity_of(plan, found.resource)
    place = HAS[found.resource]
    need = capacity + found.shortfall_bytes
    over = f"{size(found.shortfall_bytes, 1)} over"
    text = f"in {found.window} {size(need, 1)} are live, {place} {size(capacity, 1)}: {over}"
    return labelled("over", text, width, "bold red")


def _also(plan: Plan, found: Infeasible, width: int) -> list[Text]:
    """What else is exceeded, where it is exceeded most: what helps the first shortage need not help these."""
    s = plan.summary
    fullest, pinned = (max(s.windows, key=key) for key in (lambda w: w.hbm_bytes, lambda w: w.host_bytes))
    needs: dict[Resource, tuple[str, int]] = {
        "hbm": (fullest.name, fullest.hbm_bytes),
        "host": (pinned.name, pinned.host_bytes),
        "node": (pinned.name, s.node.total_bytes),
    }
    lines: list[Text] = []
    for resource, (window, need) in needs.items():
        capacity = capacity_of(plan, resource)
        if resource != found.resource and need > capacity:
            text = f"in {window} {size(need, 1)} are live, {HAS[resource]} {size(capacity, 1)}"
            lines += labelled("" if lines else "also", text, width)
    return lines


def _live(plan: Plan, found: Infeasible, width: int) -> list[Text]:
    """Objects by size, in two columns."""
    titles = NODE_TITLES | {o.name: o.title for o in plan.summary.objects}
    unit = unit_for(o.bytes for o in found.objects)
    cells = [(clip(titles.get(o.name, o.name), 30), unit(o.bytes)) for o in found.objects]
    half = -(-len(cells) // 2)
    blank = ("", "")
    rows = [(*cells[i], *(cells[i + half] if i + half < len(cells) else blank)) for i in range(half)]
    lines = table(rows, right=(1, 3), gap=3)
    return [_under(f"live, {unit.name}" if i == 0 else "", text, width) for i, text in enumerate(lines)]


def _remedies(found: Infeasible, width: int) -> list[Text]:
    """One line a remedy; a change too long for its column goes on below."""
    if not found.remedies:
        return labelled("would fit", "with no change that was found: one key, or two, of what this job states", width)
    figures = table([_figures(r) for r in found.remedies], right=(0, 1, 2), gap=3)
    room = width - LABEL - 6 - max(map(len, figures))
    parts = [part for r in found.remedies for part in r.change.split()]
    beside = max(map(len, parts)) <= room  # else the figures stand below: an override that is cut cannot be pasted
    changes = min(max(len(r.change) for r in found.remedies), room if beside else width - LABEL - 3)
    lines: list[Text] = []
    for i, (remedy, text) in enumerate(zip(found.remedies, figures, strict=True), 1):
        first, *more = joined(remedy.change.split(), changes, " ")
        rest = [f"   {part}" for part in (more if beside else [*more, f"   {text}"])]
        head = f"{i}  {first:<{changes}}   {text}" if beside else f"{i}  {first}"
        lines += [_under("" if lines else "would fit", head, width), *(_under("", part, width) for part in rest)]
    return lines


def _figures(remedy: Remedy) -> tuple[str, str, str]:
    """What a remedy frees, and its cost: of a step, and of one prompt in GPU time, which fewer prompts do not save."""
    frees = f"frees {size(remedy.frees_bytes, 1)}" if remedy.frees_bytes > 0 else "more room"
    return frees, f"step {_signed(remedy.costs_s)}", f"a prompt {percent(remedy.costs_share)}"


def percent(share: float) -> str:
    """`+1.4 %`; what rounds to nothing has no minus."""
    return f"{round(100 * share, 1) + 0.0:+.1f} %"


def _signed(value: float) -> str:
    return f"{'+' if value >= 0 else '-'}{seconds(abs(value))}"


def _under(label: str, text: str, width: int) -> Text:
    return line((f"{label:<{LABEL}}", "bold"), clip(text, width - LABEL))


# ---- the naive overlap


def naive_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """Every object by the role and engine that holds it, as in the paper's Table 1; empty for other schedules."""
    if plan.schedule != "naive":
        return []
    unit = unit_for(o.bytes for o in plan.summary.objects)
    rows = _table_one(job_of(plan), plan.summary.objects)
    total = sum(nbytes for _, _, nbytes in rows)
    title = f"naive overlap: everything stays resident, {unit.name} a GPU (paper, Table 1)"
    lines = [line((clip(title, width), "bold"))]
    for i, (group, what, nbytes) in enumerate(rows):
        again = i > 0 and rows[i - 1][0] == group
        lines.append(_table_row("" if again else group, what, unit(nbytes), width))
    lines.append(_table_row("total", "", unit(total), width, "bold"))
    more = [(what, nbytes) for _, what, nbytes in rows if what in NOT_IN_PAPER]
    if more:
        names = ", ".join(dict.fromkeys(NOT_IN_PAPER[what] for what, _ in more))
        rest = unit(total - sum(nbytes for _, nbytes in more))
        lines.append(_table_row(f"without {names}", "(the paper leaves them out)", rest, width))
    return lines


def _table_row(group: str, what: str, figure: str, width: int, style: str = "") -> Text:
    return line((clip(f"  {clip(group, 26):<28}{clip(what, 34):<36}{figure:>8}", width), style))


def _table_one(job: Job, objects: Sequence[PlannedObject]) -> list[tuple[str, str, int]]:
    """(role and engine, object, bytes) in the paper's order; the boundaries of all roles are one row, as there."""
    boundaries = [o for o in objects if o.class_ == "boundary"]
    training = f"{job.policy}, training TP={job.train_tp}"
    rows = [_table_entry(job, o, training) for o in objects if o.class_ != "boundary"]
    if boundaries:
        rows.append((training, f"preserved prefix KV, {len(boundaries)} roles", sum(o.bytes for o in boundaries)))
    groups = list(dict.fromkeys([training, *sorted(group for group, _, _ in rows)]))
    return sorted(rows, key=lambda row: (groups.index(row[0]), _paper_order(row[1])))


def _table_entry(job: Job, o: PlannedObject, training: str) -> tuple[str, str, int]:
    if o.process == "rollout":
        return f"rollout TP={job.rollout_tp}", _short(o, "rollout"), o.bytes
    if o.role in ("", job.policy):
        return training, _short(o, o.role or "training"), o.bytes
    degree = f" TP={job.trainer(o.role).tensor_parallel}" if o.role in job.roles else ""
    return o.role + degree, _short(o, o.role), o.bytes


def _paper_order(what: str) -> int:
    """Where the paper's Table 1 has this row; the vision tower, which it leaves out, comes last."""
    return next((i for i, word in enumerate(_PAPER) if word in what), len(_PAPER))


def _short(o: PlannedObject, owner: str) -> str:
    """The title without the name of its owner, which stands in the first column."""
    return o.title.removeprefix(f"{owner} ")
