"""Chunk sizes by enumeration: every number of chunks, every size of one, every suffix step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from oracles.base import Oracle, Order, solve
from rollplex.passes.chunk_sizes import FAMILIES, LAUNCH_US, Data, Model
from rollplex.passes.solver import Family, constrain
from rollplex.passes.state import SizeChoice
from rollplex.passes.update_sizes import ALIGN

OBJECTIVES = ("bytes over capacity", "suffix steps a group", "update seconds", "optimizer workspace bytes")
WINDOWS: tuple[str, ...] = ("P2 score", "P2 train", "P3 update")
GROUP = 4
LARGEST = 24
"""Units of 64 parameters in an instance: every K and E is tried."""


@dataclass(frozen=True)
class Sizes:
    """K, E and m; legal or not."""

    count: int
    units: int
    step: int


@dataclass(frozen=True)
class Instance:
    """Numbers, and one choice of sizes."""

    data: Data
    sizes: Sizes


def legal(data: Data, sizes: Sizes) -> bool:
    """K chunks of E units cover the parameters, the last one has some of them, and K is the wanted number.

    Where a snapshot is made again beside them, E is one that its bytes are known of.
    """
    parameters, chunk = data.parameters, sizes.units * ALIGN
    covered = sizes.count * chunk >= parameters and (sizes.count - 1) * chunk < -(-parameters // ALIGN) * ALIGN
    known = not data.beside or sizes.units in data.beside
    return covered and known and data.wanted in (None, sizes.count)


def worth(data: Data, sizes: Sizes) -> dict[str, int]:
    """The objectives of legal sizes."""
    flying = min(data.in_flight, sizes.count) if data.in_flight * sizes.units > data.units else data.in_flight
    units = min(flying * sizes.units, data.in_flight * sizes.units, sizes.count * sizes.units)
    workspace = units * data.element_bytes + sizes.units * data.updating_bytes
    over = 0
    for w, room in data.room.items():
        chosen = next(c for c in data.choices if c.responses == sizes.step)
        live = sum(chosen.nbytes[name] for name, windows in data.alive.items() if w in windows)
        live += workspace * ALIGN + data.beside.get(sizes.units, 0) if w == data.update_window else 0
        over += max(0, live - room)
    picoseconds = sizes.units * ALIGN * data.ps_per_element + LAUNCH_US * 10**6
    update = -(-picoseconds // 10**6) * (sizes.count + data.in_flight - 1)
    return dict(zip(OBJECTIVES, (over, data.group // sizes.step, update, workspace), strict=True))


def all_sizes(data: Data) -> Iterator[Sizes]:
    """Every legal choice."""
    for count in range(1, data.units + 1):
        for units in range(1, data.units + 1):
            for choice in data.choices:
                if legal(data, sizes := Sizes(count, units, choice.responses)):
                    yield sizes


def best(data: Data) -> dict[str, int]:
    """The lexicographic least."""
    return min((worth(data, s) for s in all_sizes(data)), key=lambda v: tuple(v.values()))


# ---- instances


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Rooms from less than nothing to plenty, workspaces alive together, a wanted number of chunks now and then."""
    parameters = draw(st.integers(1, LARGEST * ALIGN))
    total = -(-parameters // ALIGN)
    attainable = sorted({-(-total // e) for e in range(1, total + 1)})
    names = ("score", "train")
    alive = {n: tuple(sorted(draw(st.sets(st.sampled_from(WINDOWS), min_size=1)))) for n in names}
    grows = {n: draw(st.integers(1, 6000)) for n in names}
    choices = tuple(SizeChoice(m, {n: m * grows[n] for n in names}) for m in (1, 2, 4))
    wanted = draw(st.none() | st.sampled_from(attainable))
    known = draw(st.sets(st.integers(1, total), max_size=4)) | {-(-total // (wanted or 1))}
    data = Data(
        parameters=parameters,
        in_flight=draw(st.integers(1, 3)),
        element_bytes=draw(st.sampled_from([4, 8, 16])),
        updating_bytes=draw(st.sampled_from([0, 8])),
        room={w: draw(st.integers(-500, 50_000)) for w in WINDOWS},
        choices=choices,
        alive=alive,
        update_window="P3 update",
        ps_per_element=draw(st.sampled_from([0, 200, 10**6, 10**7])),
        group=GROUP,
        wanted=wanted,
        beside=draw(st.just({}) | st.fixed_dictionaries({e: st.integers(0, 20_000) for e in known})),
    )
    count, units = draw(st.integers(1, total)), draw(st.integers(1, total))
    if draw(st.booleans()):
        count = data.wanted or -(-total // units)
        units = -(-total // count) if data.wanted else units
    return Instance(data, Sizes(count, units, draw(st.sampled_from([1, 2, 4]))))


# ---- the oracle


def disagreement(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    """In the optimum, in what the solution is worth, or about one choice of sizes."""
    return _optimum(one.data, families, order) or _one(one, families, order)


def _optimum(data: Data, families: Sequence[Family[Model]], order: Order) -> str:
    model = constrain(Model(data), families)
    (solution, got), want = solve(model.cp, order(model.objectives())), best(data)
    if solution is None:
        return "not solvable"
    steps = [m for m, literal in model.step.items() if solution.true(literal)]
    sizes = [Sizes(solution.value(model.count), solution.value(model.units), m) for m in steps]
    if len(sizes) != 1 or not legal(data, sizes[0]):
        return f"the solution has illegal sizes {sizes}"
    return _differ("optimum", got, want) or _differ("the solution", got, worth(data, sizes[0]))


def _one(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    model = constrain(Model(one.data), families)
    model.cp.add(model.count == one.sizes.count)
    model.cp.add(model.units == one.sizes.units)
    model.cp.add(model.step[one.sizes.step] == 1)
    solution, got = solve(model.cp, order(model.objectives()))
    if not legal(one.data, one.sizes):
        return "" if solution is None else f"illegal {one.sizes} are allowed"
    return f"legal {one.sizes} are refused" if solution is None else _differ("sizes", got, worth(one.data, one.sizes))


def _differ(what: str, got: dict[str, int], want: dict[str, int]) -> str:
    name = next((n for n in OBJECTIVES if got[n] != want[n]), "")
    return f"{what}: {name} {got[name]}, by enumeration {want[name]}" if name else ""


def _steps_or_chunks() -> Instance:
    """All responses at once leave room for half the parameters in flight; one at a time for all of them."""
    choices = tuple(SizeChoice(m, {"train": m * 1000}) for m in (1, 2, 4))
    room = {"P3 update": LARGEST * ALIGN * 4 + 1000}
    data = Data(LARGEST * ALIGN, 1, 4, room, choices, {"train": ("P3 update",)}, "P3 update", 0, GROUP)
    return Instance(data, Sizes(1, LARGEST, 1))


CHUNK_SIZES = Oracle("chunk-sizes", FAMILIES, OBJECTIVES, instances(), disagreement, (_steps_or_chunks(),))
