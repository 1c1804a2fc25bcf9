"""The page of a plan: verdict, why it does not fit and what would, memory, schedule, contract, layout, times.

Path("plan.html").write_text(html_page(read_plan("plan.json")))     one file; it asks no network for anything
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence

from rollplex.ir.job import Job
from rollplex.ir.plan import Plan, PlannedObject
from rollplex.ir.planned_job import job_of
from rollplex.show.html import tables
from rollplex.show.html.families import FAMILIES, Shade, shades
from rollplex.show.html.gantt import gantt_picture
from rollplex.show.html.markup import Markup, el, join
from rollplex.show.html.scale import LEAST, TimeScale, time_scale
from rollplex.show.html.stack import Stack, band_picture, legend, stack_picture, unit_of
from rollplex.show.html.style import script, style_sheet
from rollplex.show.parts import in_parts
from rollplex.show.text import unit_for

Held = Mapping[str, Mapping[str, int]]
KEYS = tuple((f.key, f.name) for f in FAMILIES)


def html_page(plan: Plan, job_name: str = "") -> str:
    """The whole page; `job_name` is the job file's name, which a plan does not keep."""
    job, time = job_of(plan), time_scale(plan)
    colours = shades(plan.summary.objects, frozenset(name for name, role in job.roles.items() if role.train))
    sections = [*_why(plan, colours), *_memory(plan, job, time, colours), _schedule(plan, time)]
    sections += [_contract(plan, colours), _host(plan, time, colours), *_figures(plan)]
    body = el("main", _head(plan, job, job_name), *sections, _foot(plan))
    tip = el("div", id="tip", role="status", hidden="hidden")
    code = Markup(f"<script>{script()}</script>")
    return f"<!doctype html>\n{el('html', _meta(plan, job_name), el('body', body, tip, code), lang='en')}\n"


def _meta(plan: Plan, job_name: str) -> Markup:
    """Nothing is loaded from anywhere, and no script runs but ours: the browser is told so."""
    digest = base64.b64encode(hashlib.sha256(script().encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=policy),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("title", _title(plan, job_name)),
        Markup(f"<style>{style_sheet()}</style>"),
    )


def _title(plan: Plan, job_name: str) -> str:
    return f"{plan.algorithm.partition(':')[0]} \u00d7 {job_name or job_of(plan).spec.name}"


# ---- sections


def _head(plan: Plan, job: Job, job_name: str) -> Markup:
    s = plan.summary
    unit = unit_for([s.capacity_bytes])
    word, kind = ("FITS", "fits") if plan.feasible else ("DOES NOT FIT", "fails")
    peak = f"peak {unit(s.peak_hbm_bytes, 1)} of {unit.named(s.capacity_bytes, 1)} in {s.peak_window}"
    verdict = el("p", el("span", word, class_=f"verdict {kind}"), el("span", peak, class_="peak"))
    button = el("button", "day / night", id="theme", type="button")
    top = el("div", el("h1", _title(plan, job_name)), button, class_="top")
    only = "Plan only, no backend executes it yet: " + "; ".join(plan.not_executable)
    note = [el("p", only, class_="note")] if plan.not_executable else []
    return el("header", top, verdict, *note, _facts(job))


def _facts(job: Job) -> Markup:
    """`Job.describe` as names and values."""
    found: list[tuple[str, str]] = []
    for row in job.describe().splitlines():
        for half in (row[:59], row[59:]):
            name, _, value = half.strip().partition(" ")
            if value.strip():
                found.append((name, value.strip()))
    made = tables.pairs(found)
    return Markup(made.replace("<dl>", '<dl class="facts">', 1))


def _section(name: str, *parts: object) -> Markup:
    return el("section", el("h2", name), *parts)


def _why(plan: Plan, colours: Mapping[str, Shade]) -> Iterator[Markup]:
    found = plan.infeasible
    if found is None:
        return
    yield _section("Why it does not fit", tables.shortfall(plan, found), tables.live_bars(plan, found, colours))
    about = el("p", "Each was compiled again with the change and accepted by the checker.", class_="faint")
    yield _section("What would fit", about, el("div", tables.remedies(found), class_="remedies"))


def _memory(plan: Plan, job: Job, time: TimeScale, colours: Mapping[str, Shade]) -> Iterator[Markup]:
    """One picture a pool of GPUs, with its bands by role and its numbers."""
    for pool in plan.summary.pools:
        mine = [o for o in plan.summary.objects if plan.pool_of(o.name) == pool.name]
        held = _held(plan, mine)
        which = f" of the {pool.name} pool ({pool.gpus} GPUs)" if len(plan.summary.pools) > 1 else ""
        title = f"Memory of a GPU{which}"
        stack = _stack(plan, title, mine, held, time, colours, plan.summary.capacity_bytes)
        table = tables.bytes_by_window(plan, mine, held, stack.unit, f"{title}, by object and window")
        yield _section(
            title,
            el("p", _widths(time), class_="faint"),
            _picture(title, stack_picture(stack)),
            legend(stack.shades, KEYS),
            *_bands(stack, mine, job),
            el("details", el("summary", "The same as a table"), table),
        )


def _widths(time: TimeScale) -> str:
    text = "Windows are as wide as their predicted seconds."
    narrow = any(s.widened for s in time.spans)
    return text + (f" * too short to be seen, drawn {LEAST:.0f} pixels wide." if narrow else "")


def _held(plan: Plan, objects: Sequence[PlannedObject]) -> Held:
    names = {o.name for o in objects}
    return {w.name: {o: n for o, n in w.by_object.items() if o in names} for w in plan.summary.windows}


def _stack(
    plan: Plan,
    title: str,
    objects: Sequence[PlannedObject],
    held: Held,
    time: TimeScale,
    colours: Mapping[str, Shade],
    capacity: int,
) -> Stack:
    unit = unit_of(held, capacity)
    totals = "; ".join(f"{w} {unit.named(sum(objects.values()))}" for w, objects in held.items())
    found = plan.infeasible
    here = {name: shade for name, shade in colours.items() if any(name in h for h in held.values())}
    return Stack(
        title=title,
        about=f"Stacked by object, capacity {unit.named(capacity)}. {totals}",
        objects=objects,
        held=held,
        capacity=capacity,
        shades=here,
        time=time,
        unit=unit,
        first_over=found.window if found and found.resource == "hbm" else "",
    )


def _bands(stack: Stack, objects: Sequence[PlannedObject], job: Job) -> list[Markup]:
    """The same objects apart, by who holds them."""
    groups: dict[str, list[PlannedObject]] = {}
    for o in objects:
        groups.setdefault(_holder(o, job), []).append(o)
    bands = [_band(stack, who, mine) for who, mine in groups.items()]
    most = max((max(b.total(s.name) for s in b.time.spans) for b in bands), default=0)
    shown = [band_picture(b, most) for b in bands if any(b.total(s.name) for s in b.time.spans)]
    return [el("h3", "By role"), _picture("Memory by role", join(shown))] if len(shown) > 1 else []


def _holder(o: PlannedObject, job: Job) -> str:
    """Whose an object is: the rollout engine's, a role's, or the training process's own."""
    if o.process == "rollout":
        return "rollout engine"
    if o.role not in job.roles:
        return "training process"
    return f"{o.role}, {'training' if job.roles[o.role].train else 'scoring'}"


def _band(stack: Stack, who: str, objects: Sequence[PlannedObject]) -> Stack:
    names = {o.name for o in objects}
    return Stack(
        title=who,
        about=f"Memory held for {who}",
        objects=objects,
        held={w: {o: n for o, n in held.items() if o in names} for w, held in stack.held.items()},
        capacity=stack.capacity,
        shades={name: shade for name, shade in stack.shades.items() if name in names},
        time=stack.time,
        unit=stack.unit,
        height=64.0,
    )


def _picture(name: str, picture: Markup) -> Markup:
    return el("div", picture, class_="scroll", tabindex=0, role="region", aria_label=name)


def _schedule(plan: Plan, time: TimeScale) -> Markup:
    about = el(
        "p",
        "Shaded where prefix work runs beside decode; lines are barriers that all processes meet at.",
        class_="faint",
    )
    table = tables.windows_table(plan)
    name = f"Schedule: {plan.schedule}"
    return _section(
        name,
        about,
        _picture(name, gantt_picture(plan, time)),
        el("details", el("summary", "The same as a table"), table),
    )


def _contract(plan: Plan, colours: Mapping[str, Shade]) -> Markup:
    about = "+ made in this window, \u2022 used in it; host: in the pinned pool; drop: to be made again"
    about += "; part: comes or goes in parts" if in_parts(plan) else ""
    return _section(
        "State contract", el("p", about, class_="faint"), el("div", tables.contract(plan, colours), class_="contract")
    )


def _host(plan: Plan, time: TimeScale, colours: Mapping[str, Shade]) -> Markup:
    """The pinned pool, as memory of a GPU is shown."""
    windows, objects = plan.summary.windows, plan.summary.objects
    held = {
        w.name: {o.name: o.bytes for o in objects if o.host_backed or o.residency.get(w.name) == "host"}
        for w in windows
    }
    name = "Pinned host memory, one GPU\u2019s share"
    if not any(held.values()):
        return _section(name, el("p", "Not used."))
    stack = _stack(plan, name, objects, held, time, colours, plan.summary.host_capacity_bytes)
    table = tables.bytes_by_window(plan, objects, held, stack.unit, f"{name}, by object and window")
    shown = stack_picture(Stack(**{**stack.__dict__, "height": 190.0, "first_over": ""}))
    return _section(name, _picture(name, shown), legend(stack.shades, KEYS),
                    el("details", el("summary", "The same as a table"), table))  # fmt: skip


def _on_host(o: PlannedObject, window: str) -> bool:
    return o.host_backed or o.residency.get(window) == "host"


def _figures(plan: Plan) -> Iterator[Markup]:
    pair = (
        _section("Predicted times", tables.times(plan)),
        _section("Chunks and sharing", tables.chunks(plan)),
        _section("Weight layout", tables.layout(plan)),
        _section("Warnings", tables.warnings(plan)),
    )
    yield el("div", *pair, class_="two")
    yield _section("Solvers", tables.solvers(plan))


def _foot(plan: Plan) -> Markup:
    said = "Bytes are the plan\u2019s, to the byte; seconds are predicted from data sheets, never measured."
    return el("footer", f"{plan.algorithm}. {said}")
