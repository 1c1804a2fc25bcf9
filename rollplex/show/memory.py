"""Memory over the iteration: one bar a window against the capacity, the largest objects under the peak, the host pool.

Where rollout has GPUs of its own, each pool has its bars.

P1 decode            ##############################################....|  73.27  88.4 s  peak
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from rollplex.ir.plan import Plan, PoolSummary, WindowSummary
from rollplex.show.text import LABEL, WIDTH, Unit, clip, joined, labelled, line, seconds, unit_for

_NAME, _FIGURE, _SECONDS, _MARK = 30, 9, 9, 6  # a window's name has at most so many characters
_LINES = 2  # of objects under the peak


def memory_lines(plan: Plan, width: int = WIDTH) -> list[Text]:
    """The bars of every pool, then the pinned host memory, and the step's batch beside it."""
    bars = (text for pool in plan.summary.pools for text in _bars(plan, pool, width))
    return [*bars, *_pinned(plan, width), *_node(plan, width)]


def _bars(plan: Plan, pool: PoolSummary, width: int) -> list[Text]:
    """One bar a window: what a GPU of the pool holds."""
    summary = plan.summary
    unit = unit_for([summary.capacity_bytes, summary.peak_hbm_bytes])
    name = 2 + min(max((len(w.name) for w in summary.windows), default=0), _NAME) + 2
    which = f" of the {pool.name} pool ({pool.gpus})" if len(summary.pools) > 1 else ""
    title, capacity = f"memory of a GPU{which}, {unit.name}", f"capacity {unit(summary.capacity_bytes)}"
    lines = [line((f"{title:<{width - len(capacity)}}", "bold"), capacity)]
    for w in summary.windows:
        live = {o: nbytes for o, nbytes in w.by_object.items() if plan.pool_of(o) == pool.name}
        peak = w.name == pool.peak_window
        lines.append(_bar_line(plan, w, sum(live.values()), peak, unit, name, width))
        lines += _largest(plan, live, unit, name, width) if peak else []
    return lines


def _bar_line(plan: Plan, w: WindowSummary, held: int, peak: bool, unit: Unit, name: int, width: int) -> Text:
    room = width - name - _FIGURE - _SECONDS - _MARK
    over = held > plan.summary.capacity_bytes
    made = line(
        f"  {clip(w.name, name - 4):<{name - 2}}",
        *bar(held, plan.summary.capacity_bytes, plan.summary.peak_hbm_bytes, room),
        (f"{unit(held):>{_FIGURE}}", "bold red" if over else ""),
        (f"{seconds(w.seconds):>{_SECONDS}}", "dim"),
        ("  peak" if peak else "", "bold"),
    )
    return made


def bar(held: int, capacity: int, peak: int, room: int) -> list[tuple[str, str]]:
    """`room` characters to the scale of the larger of capacity and peak: # held, ! held beyond it, | the capacity."""
    scale = (room - 1) / max(capacity, peak, 1)
    end = min(round(scale * capacity), room - 2 if peak > capacity else room - 1)  # where the capacity's mark stands
    if held <= capacity:
        inside, beyond = min(round(scale * held), end), 0
    else:
        inside, beyond = end, min(max(round(scale * held) - end, 1), room - 1 - end)
    free, rest = end - inside, room - 1 - end - beyond
    return [("#" * inside, "green"), ("." * free, "dim"), ("|", "bold"), ("!" * beyond, "red"), (" " * rest, "")]


def _largest(plan: Plan, held: dict[str, int], unit: Unit, name: int, width: int) -> list[Text]:
    """Under the peak: the largest of what is live."""
    titles = {o.name: o.title for o in plan.summary.objects}
    live = by_size((titles.get(key, key), nbytes) for key, nbytes in held.items())
    return [line((" " * name + text, "dim")) for text in _summed(live, unit, width - name)]


def by_size(sizes: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """The largest first; ties by name."""
    return sorted(sizes, key=lambda item: (-item[1], item[0]))


def _summed(sizes: list[tuple[str, int]], unit: Unit, width: int) -> list[str]:
    """As many as two lines hold, and the sum of the rest."""
    for shown in range(len(sizes), -1, -1):
        rest = sizes[shown:]
        parts = [f"{title} {unit(nbytes, 1)}" for title, nbytes in sizes[:shown]]
        parts += [f"{len(rest)} more {unit(sum(nbytes for _, nbytes in rest), 1)}"] if rest else []
        lines = joined(parts, width)
        if len(lines) <= _LINES:
            return lines
    return []


def _node(plan: Plan, width: int) -> list[Text]:
    """The fullest node's host memory: pinned pools, processes, the step's batch (on no GPU more than a microbatch)."""
    n, unit = plan.summary.node, unit_for([plan.summary.node.capacity_bytes])
    head = f"{unit(n.total_bytes, 1)} of {unit.named(n.capacity_bytes, 1)} of host memory"
    parts = [("pinned pools", n.pinned_bytes), ("processes", n.process_bytes), ("batch of a step", n.batch_bytes)]
    lines = labelled("node", head, width, "bold red" if n.total_bytes > n.capacity_bytes else "")
    rest = _summed([part for part in parts if part[1]], unit, width - LABEL)
    return lines + [line((" " * LABEL + text, "dim")) for text in rest]


def _pinned(plan: Plan, width: int) -> list[Text]:
    """The pinned host pool in the window that fills it most."""
    summary = plan.summary
    fullest = max(summary.windows, key=lambda w: w.host_bytes, default=None)
    if fullest is None or not fullest.host_bytes:
        return labelled("host pool", "not used", width)
    unit = unit_for([summary.host_capacity_bytes])
    held = [(o.title, o.bytes) for o in summary.objects if o.host_backed or o.residency.get(fullest.name) == "host"]
    head = f"peak {unit(summary.peak_host_bytes, 1)} of {unit.named(summary.host_capacity_bytes, 1)}, one GPU's share"
    over = summary.peak_host_bytes > summary.host_capacity_bytes
    lines = labelled("host pool", f"{head}  in  {fullest.name}", width, "bold red" if over else "")
    rest = _summed(by_size(held), unit, width - LABEL)
    return lines + [line((" " * LABEL + text, "dim")) for text in rest]
