"""The tables of the page: remedies, state contract, bytes by window, layout, times, solvers, warnings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rollplex.ir.plan import Infeasible, Plan, PlannedObject, Remedy
from rollplex.ir.planned_job import job_of
from rollplex.ir.planned_node import NODE_TITLES
from rollplex.show.html.families import Shade
from rollplex.show.html.markup import Markup, el, join
from rollplex.show.parts import in_parts, told
from rollplex.show.sharing import sharing_rows
from rollplex.show.text import Unit, seconds, size, unit_for
from rollplex.show.verdict import HAS, capacity_of, percent

Cell = tuple[object, str] | object
MINUS = "\u2212"
PLACES = {"hbm": "HBM", "host": "host", "dropped": "drop", "-": "\u2013"}


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], caption: str, numbers: Iterable[int] = ()) -> Markup:
    """A table that scrolls by itself where it is wider than the page; the first cell of a row names the row."""
    right = set(numbers)
    tops = [el("th", name, scope="col", class_="n" if i in right else None) for i, name in enumerate(head)]
    body = [el("tr", *(_cell(i, cell, i in right) for i, cell in enumerate(row))) for row in rows]
    made = el("table", el("caption", caption, class_="hidden"), el("thead", el("tr", *tops)), el("tbody", *body))
    return el("div", made, class_="scroll", tabindex=0, role="region", aria_label=caption)


def _cell(index: int, cell: Cell, number: bool) -> Markup:
    value, kind = cell if isinstance(cell, tuple) else (cell, "")
    classes = " ".join(c for c in ("n" if number else "", kind) if c) or None
    return el("th", value, scope="row", class_=classes) if index == 0 else el("td", value, class_=classes)


# ---- infeasible


def shortfall(plan: Plan, found: Infeasible) -> Markup:
    """One sentence: where, how much, of what."""
    capacity, place = capacity_of(plan, found.resource), HAS[found.resource].replace("'", "\u2019")
    return el(
        "p", "In ", el("b", found.window), f" {size(capacity + found.shortfall_bytes, 1)} are live and {place} "
        f"{size(capacity, 1)}: ", el("b", f"{size(found.shortfall_bytes, 1)} over", class_="bad"), ".",
    )  # fmt: skip


def live_bars(plan: Plan, found: Infeasible, shades: Mapping[str, Shade]) -> Markup:
    """What is live in the window that is over, each object as a bar of its size."""
    titles = NODE_TITLES | {o.name: o.title for o in plan.summary.objects}
    unit, most = unit_for(o.bytes for o in found.objects), max((o.bytes for o in found.objects), default=1) or 1
    rows = [
        (
            titles.get(o.name, o.name),
            (unit(o.bytes), ""),
            (el("i", class_="bar", style=f"width:{100 * o.bytes / most:.2f}%;{shades[o.name].style}")
             if o.name in shades else "", "wide"),
        )
        for o in found.objects
    ]  # fmt: skip
    return table(("live in it", unit.name, ""), rows, f"Objects live in {found.window}, by size", (1,))


def remedies(found: Infeasible) -> Markup:
    """Changes that make the job fit, to be pasted behind the command."""
    if not found.remedies:
        return el("p", "No change of one key, or of two, was found that makes this job fit.")
    rows = [_remedy(i, r) for i, r in enumerate(found.remedies, 1)]
    head = ("", "change", "frees there", "a step", "GPU time of a prompt", "shrinks")
    return table(head, rows, "Changes that make the job fit, the cheapest for the work it does first", (2, 3, 4))


def _remedy(index: int, r: Remedy) -> Sequence[Cell]:
    change = join((el("code", part) for part in r.change.split()), " ")
    frees = size(r.frees_bytes, 1) if r.frees_bytes > 0 else "more room"
    step = ("+" if r.costs_s >= 0 else MINUS) + seconds(abs(r.costs_s))
    prompt = percent(r.costs_share).replace("-", MINUS)
    return (index, change, frees, step, prompt, ", ".join(r.shrinks[:4]))


# ---- the contract


def contract(plan: Plan, shades: Mapping[str, Shade]) -> Markup:
    """One line an object: where it is in every window, where it is made and used."""
    objects, windows = plan.summary.objects, plan.summary.windows
    unit = unit_for(o.bytes for o in objects)
    head = ("object", unit.name, "class", *(w.name for w in windows))
    parts = in_parts(plan)
    rows = [(_named(o, shades), unit(o.bytes), _class(o), *_places(plan, o, parts)) for o in objects]
    return table(head, rows, "State contract: where every object is in every window", (1,))


def _named(o: PlannedObject, shades: Mapping[str, Shade]) -> Markup:
    return join((el("i", class_="dot", style=shades[o.name].style), el("span", o.title, title=f"{o.name}: {o.why}")))


def _class(o: PlannedObject) -> str:
    return o.class_ + (", attached" if o.attached else "")


def _places(plan: Plan, o: PlannedObject, parts: frozenset[tuple[str, str]]) -> list[Cell]:
    cells: list[Cell] = []
    for w in plan.summary.windows:
        place = o.residency.get(w.name, "-")
        mark = " +" if w.name == o.produced else " \u2022" if w.name in o.consumed else ""
        shown = "part" if (o.name, w.name) in parts else PLACES[place]
        cells.append((shown + mark, f"at-{place if place != '-' else 'none'}"))
    return cells


# ---- figures as tables


def bytes_by_window(
    plan: Plan, objects: Sequence[PlannedObject], held: Mapping[str, Mapping[str, int]], unit: Unit, caption: str
) -> Markup:
    """The picture of memory as numbers, for those who do not see it."""
    windows = plan.summary.windows
    here = [o for o in objects if any(held[w.name].get(o.name) for w in windows)]
    rows: list[Sequence[Cell]] = [
        (o.title, *(unit(held[w.name][o.name]) if o.name in held[w.name] else "\u2013" for w in windows)) for o in here
    ]
    rows.append((("all", "sum"), *((unit(sum(held[w.name].values())), "sum") for w in windows)))
    return table((unit.name, *(w.name for w in windows)), rows, caption, range(1, len(windows) + 1))


def windows_table(plan: Plan) -> Markup:
    """Seconds and bytes of every window."""
    unit = unit_for([plan.summary.capacity_bytes])
    rows = [(w.name, seconds(w.seconds), unit(w.hbm_bytes), unit(w.host_bytes)) for w in plan.summary.windows]
    return table(("window", "predicted", f"HBM, {unit.name}", f"host, {unit.name}"), rows, "Windows", (1, 2, 3))


def pairs(rows: Iterable[tuple[str, object]]) -> Markup:
    """Names and values, one under the other."""
    return el("dl", *(el("div", el("dt", name), el("dd", value)) for name, value in rows))


def times(plan: Plan) -> Markup:
    """Equation 1 of the paper, predicted."""
    t = plan.summary.times
    return pairs(
        (
            ("step", seconds(t.step_s)),
            ("decode", seconds(t.decode_s)),
            ("prefix", seconds(t.prefix_s)),
            (
                "hidden behind decode",
                f"{seconds(max(t.serial_s - t.step_s, 0))} of at most {seconds(t.saving_bound_s)}",
            ),
            ("after the rollout", seconds(t.post_s)),
            ("decode slowed by", seconds(t.interference_s)),
            ("transfers not hidden", seconds(t.exposed_transfer_s)),
            ("serial", f"{seconds(t.serial_s)}, {t.speedup_vs_serial:.2f}\u00d7"),
        )
    )


def chunks(plan: Plan) -> Markup:
    """Pieces of the update, the microbatch, the sharing policy."""
    o, m, policy = plan.summary.chunks.optimizer, plan.summary.chunks.microbatch, plan.summary.policy
    released = f", {text}" if (text := told(plan)) else ""
    return pairs(
        (
            ("optimizer", f"{o.count} \u00d7 {size(o.bytes)}, {size(o.workspace_bytes)} in flight{released}"),
            ("microbatch", f"{m.prefix_prompts} prompt, {m.suffix_responses} responses"),
            (
                "sharing",
                "; ".join([policy.kind + (f": {policy.why}" if policy.why else ""), *sharing_rows(plan, 1000)]),
            ),
        )
    )


def layout(plan: Plan) -> Markup:
    """Shares of the three cases as one bar, with what the rest costs."""
    found = plan.summary.layout
    total = sum(c.params for c in found.cases.values())
    if not total:
        return el("p", "The engines share no weights.")
    names = {"1": "as it lies", "2": "stored transposed", "3": "rebuilt after every update"}
    shares = {k: 100 * c.params / total for k, c in found.cases.items()}
    bar = el("div", *(el("i", class_=f"case{k}", style=f"width:{v:.3f}%") for k, v in shares.items()), class_="cases")
    rows = [
        (
            join((el("i", class_=f"dot case{k}"), f"case {k}")),
            names.get(k, ""),
            f"{v:.2f} %",
            size(found.cases[k].bytes),
        )
        for k, v in shares.items()
    ]
    about = pairs(
        (
            ("order", f"{found.order}, q = {found.q}"),
            ("case-3 buffer", f"{size(found.case3_buffer_bytes)} a GPU"),
            ("exchange", f"{size(found.exchange_bytes_per_gpu)} a GPU"),
        )
    )
    return join(
        (bar, table(("", "", "share", "bytes"), rows, "Layout of the language model\u2019s weights", (2, 3)), about)
    )


def solvers(plan: Plan) -> Markup:
    """What every solver pass reached, and what it could prove."""
    rows = [(s.name, s.objective, _figure(s.objective, s.value), _figure(s.objective, s.bound), s.status)
            for s in plan.summary.solvers]  # fmt: skip
    return table(("pass", "objective", "value", "bound", ""), rows, "Solver passes", (2, 3))


def _figure(objective: str, value: float) -> str:
    words = objective.split()
    return size(value) if "bytes" in words else seconds(value) if "seconds" in words else f"{value:g}"


def warnings(plan: Plan) -> Markup:
    """What a reader should know before trusting the plan."""
    found = dict.fromkeys((*job_of(plan).notes(), *plan.summary.warnings))
    return el("ul", *(el("li", w) for w in found)) if found else el("p", "None.")
