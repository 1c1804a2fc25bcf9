"""Memory over an iteration, object by object, as the paper's Figure 8: a step a window, the capacity dashed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollplex.ir.plan import PlannedObject
from rollplex.show.html.families import Shade
from rollplex.show.html.markup import Markup, el, join
from rollplex.show.html.scale import LEFT, RIGHT, ByteScale, Span, TimeScale
from rollplex.show.text import Unit, clip, seconds, unit_for

CHARACTER, LINE = 6.1, 13.0  # of a label, in pixels
NAMES = 118.0  # room under the axis for slanted names of windows


@dataclass(frozen=True)
class Stack:
    """What is drawn: for each window the bytes of each object, and the capacity that they must stay below."""

    title: str
    about: str
    objects: Sequence[PlannedObject]
    held: Mapping[str, Mapping[str, int]]
    capacity: int
    shades: Mapping[str, Shade]
    time: TimeScale
    unit: Unit
    height: float = 340.0
    first_over: str = ""

    def total(self, window: str) -> int:
        """Bytes in a window."""
        return sum(self.held[window].values())


def stack_picture(stack: Stack) -> Markup:
    """The whole picture with its axes, phases above and names of windows below."""
    top, bottom = 40.0, 40.0 + stack.height
    most = max(stack.capacity, *(stack.total(s.name) for s in stack.time.spans)) * 1.07
    scale = ByteScale(most, top, bottom)
    parts = (
        el("title", stack.title),
        el("desc", stack.about),
        _hatch(),
        _phases(stack.time, top),
        _grid(stack, scale),
        *_objects(stack, scale),
        _capacity(stack, scale),
        _totals(stack, scale),
        window_names(stack.time, bottom),
    )
    return svg(stack.time.width, bottom + NAMES, *parts)


def svg(width: float, height: float, *parts: object) -> Markup:
    """A picture that keeps the size of its letters and is as wide as it must be."""
    return el(
        "svg", *parts, xmlns="http://www.w3.org/2000/svg", role="group", viewBox=f"0 0 {width:g} {height:g}",
        width=width, height=height,
    )  # fmt: skip


def _hatch() -> Markup:
    lines = el("path", d="M0,8 l8,-8 M-2,2 l4,-4 M6,10 l4,-4", class_="hatch")
    pattern = el("pattern", lines, id="over", width=8, height=8, patternUnits="userSpaceOnUse")
    return el("defs", pattern)


def _phases(time: TimeScale, top: float) -> Markup:
    """P1, P2, P3 as bands above the plot."""
    bands = []
    for phase, start, end in time.phases():
        bands.append(el("rect", x=start + 1, y=6, width=end - start - 2, height=17, rx=3, class_="phase"))
        bands.append(el("text", phase, x=(start + end) / 2, y=18.5, class_="phase-name"))
        if start > LEFT:
            bands.append(el("line", x1=start, x2=start, y1=6, y2=top, class_="barrier"))
    return el("g", *bands)


def _grid(stack: Stack, scale: ByteScale) -> Markup:
    lines = []
    for nbytes in scale.ticks(stack.unit):
        y, digits = scale.y(nbytes), 0 if scale.ticks(stack.unit)[-1] >= 4 * stack.unit.nbytes else 1
        lines.append(el("line", x1=LEFT, x2=stack.time.width - RIGHT, y1=y, y2=y, class_="grid"))
        lines.append(el("text", f"{nbytes / stack.unit.nbytes:.{digits}f}", x=LEFT - 8, y=y + 4, class_="tick"))
    lines.append(el("text", stack.unit.name, x=LEFT - 8, y=scale.top - 10, class_="tick unit"))
    return el("g", *lines)


# ---- objects


def _objects(stack: Stack, scale: ByteScale) -> list[Markup]:
    """One group an object, reachable by keyboard; inside it one bar a window."""
    by_name = {o.name: o for o in stack.objects}
    base = dict.fromkeys((s.name for s in stack.time.spans), 0)
    groups = []
    for name in stack.shades:
        bars, widest = [], (0.0, "")
        for span in stack.time.spans:
            nbytes = stack.held[span.name].get(name, 0)
            if nbytes:
                bars.append(_bar(stack, scale, by_name[name], span, base[span.name], nbytes))
                height = scale.y(0) - scale.y(nbytes)
                widest = max(widest, (span.width, span.name)) if height >= LINE else widest
                base[span.name] += nbytes
        if bars:
            groups.append(_group(stack, by_name[name], bars, _label(stack, scale, by_name[name], widest[1], base)))
    return groups


def _group(stack: Stack, o: PlannedObject, bars: list[Markup], label: Markup | None) -> Markup:
    here = ", ".join(s.name for s in stack.time.spans if o.name in stack.held[s.name])
    about = f"{o.title}, {stack.unit.named(o.bytes)}, {o.class_}; in {here}"
    return el(
        "g", *bars, *([label] if label else []), class_="object", style=stack.shades[o.name].style, tabindex=0,
        role="img", aria_label=about, data_object=o.name, data_tip=about,
    )  # fmt: skip


def _bar(stack: Stack, scale: ByteScale, o: PlannedObject, span: Span, base: int, nbytes: int) -> Markup:
    y = scale.y(base + nbytes)
    tip = f"{o.title}\n{stack.unit.named(nbytes)} in {span.name}\n{o.class_}{'; ' + o.why if o.why else ''}"
    return el(
        "rect", x=span.x, y=y, width=span.width, height=scale.y(base) - y, class_="bar", data_window=span.name,
        data_bytes=nbytes, data_tip=tip,
    )  # fmt: skip


def _label(stack: Stack, scale: ByteScale, o: PlannedObject, window: str, base: Mapping[str, int]) -> Markup | None:
    """The object's name where it is widest, if there is room for enough of it."""
    if not window:
        return None
    span, nbytes = stack.time.span(window), stack.held[window][o.name]
    room = int((span.width - 10) / CHARACTER)
    full = f"{o.title}  {stack.unit(nbytes, 1)}"
    shown = full if len(full) <= room else o.title if len(o.title) <= room else clip(o.title, room) if room >= 8 else ""
    y = scale.y(base[window] - nbytes / 2) + 4
    return el("text", shown, x=span.x + 6, y=y, class_="label") if shown else None


# ---- capacity


def _capacity(stack: Stack, scale: ByteScale) -> Markup:
    """The dashed line, and hatching over what stands above it."""
    y = scale.y(stack.capacity)
    over = [s for s in stack.time.spans if stack.total(s.name) > stack.capacity]
    hatched = [
        el("rect", x=s.x, y=scale.y(stack.total(s.name)), width=s.width, height=y - scale.y(stack.total(s.name)),
           class_="over") for s in over
    ]  # fmt: skip
    line = el("line", x1=LEFT, x2=stack.time.width - RIGHT, y1=y, y2=y, class_="capacity")
    name = f"capacity {stack.unit.named(stack.capacity)}"
    text = el("text", name, x=stack.time.width - RIGHT, y=y - 6, class_="capacity-name")
    return el("g", *hatched, line, text)


def _totals(stack: Stack, scale: ByteScale) -> Markup:
    """The sum over every window, and a cross where the plan first fails."""
    marks = []
    for s in stack.time.spans:
        total = stack.total(s.name)
        over = total > stack.capacity
        crossed = scale.y(total) - 4 - scale.y(stack.capacity)
        y = scale.y(stack.capacity) + 14 if -16 < crossed < 6 and not over else scale.y(total) - 4
        text = ("\u2715 " if s.name == stack.first_over else "") + stack.unit(total, 1)
        marks.append(el("text", text, x=s.x + s.width / 2, y=y, class_="total is-over" if over else "total"))
    return el("g", *marks)


def window_names(time: TimeScale, y: float) -> Markup:
    """Slanted names under the axis with their seconds; a tick where each window begins."""
    marks = []
    for s in time.spans:
        x = s.x + s.width / 2
        name = clip(s.name.removeprefix(s.phase).strip() or s.name, 21)
        marks.append(el("line", x1=s.x, x2=s.x, y1=y, y2=y + 5, class_="axis"))
        where = {"x": x, "y": y + 14, "transform": f"rotate(-42 {x:.1f} {y + 14:.1f})"}
        note = f" {seconds(s.seconds)}" + (" *" if s.widened else "")
        marks.append(el("text", name, el("tspan", note, class_="faint"), class_="window", **where))
    end = time.width - RIGHT
    marks.append(el("line", x1=LEFT, x2=end, y1=y, y2=y, class_="axis"))
    return el("g", *marks)


def unit_of(held: Mapping[str, Mapping[str, int]], capacity: int) -> Unit:
    """One unit for a picture."""
    return unit_for([capacity, *(sum(objects.values()) for objects in held.values())])


# ---- bands by role


def band_picture(stack: Stack, most: int) -> Markup:
    """A low picture of some of the objects, to the scale of the largest band; its windows are those of the others."""
    top, bottom = 18.0, 18.0 + stack.height
    scale = ByteScale(most * 1.12, top, bottom)
    ends = [el("line", x1=LEFT, x2=stack.time.width - RIGHT, y1=bottom, y2=bottom, class_="axis")]
    peak = max(stack.total(s.name) for s in stack.time.spans)
    y = scale.y(peak)
    ends.append(el("line", x1=LEFT, x2=stack.time.width - RIGHT, y1=y, y2=y, class_="grid"))
    ends.append(el("text", stack.unit(peak, 1), x=LEFT - 8, y=y + 4, class_="tick"))
    name = el("text", stack.title, x=LEFT, y=top - 4, class_="band")
    parts = (el("title", stack.title), el("desc", stack.about), *ends, *_objects(stack, scale), name)
    return svg(stack.time.width, bottom + 4, *parts)


def legend(stack_shades: Mapping[str, Shade], families: Sequence[tuple[str, str]]) -> Markup:
    """The families that are in the picture."""
    here = {s.family for s in stack_shades.values()}
    items = [
        el("span", el("i", style=f"--c:var(--{key});--mix:100%"), name, class_="key")
        for key, name in families
        if key in here
    ]
    return el("p", join(items), class_="legend")
