"""Residency by enumeration: the maths of passes/residency.py in plain Python, over every assignment of places."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from oracles.base import Oracle, Order, solve
from rollplex.ir.plan import Residency as Place
from rollplex.passes.residency import FAMILIES, Model, read
from rollplex.passes.residency_data import PLACES, Data, Item, Size, Stretch
from rollplex.passes.solver import Family, constrain

OBJECTIVES = (
    *("bytes over capacity", "bytes over in all windows", "seconds lost"),
    *("bytes in the last tenth", "bytes moved", "peak bytes"),
)
Assignment = dict[tuple[str, str], frozenset[Place]]
"""Places of every (object, window): one of them where the assignment is legal."""


# ---- what an assignment is worth


def legal(data: Data, at: Assignment) -> bool:
    """(1) one place, (2) an allowed one, (3) the same for a saved state's whole life."""
    for o in data.items:
        places = [at[o.name, w] for w in o.places]
        if any(len(p) != 1 or not p <= o.places[w] for p, w in zip(places, o.places, strict=True)):
            return False
        if o.recomputable and len(set(places)) > 1:
            return False
    return True


def worth(data: Data, at: Assignment) -> dict[str, int]:
    """The objectives of a legal assignment, with the best steps: what may leave in pieces does where that is best."""
    may = [o.name for o in data.items if o.leaves and turned(o, at, o.leaves) and at[o.name, o.leaves] != {"hbm"}]
    choices = [set(c) for n in range(len(may) + 1) for c in itertools.combinations(may, n)]
    every = (worth_of(data, at, pieces, size) for pieces in choices for size in data.sizes)
    return min(every, key=lambda v: tuple(v.values()))


def worth_of(data: Data, at: Assignment, pieces: set[str], size: Size) -> dict[str, int]:
    """The objectives where these objects leave in pieces, and suffix steps have this size."""
    spots = list(itertools.product({o.pool for o in data.items}, data.windows))
    held = {(p, w): held_in(data, at, p, w, size) for p, w in spots}
    leaving = {(o.pool, o.final): 0 for o in data.items}
    for o in (o for o in data.items if o.name in pieces):
        leaving[o.pool, o.final] += o.units
    pinned = {(p, w): pinned_in(data, at, p, w) + leaving.get((p, w), 0) for p, w in spots}
    excess = [max(0, n - data.capacity) for n in held.values()]
    excess += [max(0, n - data.host_capacity) for n in pinned.values()]
    saved = {
        w: sum(o.link_us - o.early_us for o in data.items if o.name in pieces and o.leaves == w) for w in data.windows
    }
    exposed = sum(max(0, sum(busy(data, at, w) - saved[w] for w in k.windows) - k.slack_us) for k in data.stretches)
    lost = exposed + size.late_us
    moved = sum(o.units * crossings(o, at, w) for o in data.items for w in o.places)
    peak = max(held.values())
    near = max(0, peak - (data.capacity - data.capacity // 10))
    return dict(zip(OBJECTIVES, (max(excess), sum(excess), lost, near, moved, peak), strict=True))


def held_in(data: Data, at: Assignment, pool: str, w: str, size: Size) -> int:
    """Pages in HBM at the fullest of the moments of a window, with those that workspaces have beyond their own."""
    here = [o for o in data.items if o.pool == pool and at.get((o.name, w)) == {"hbm"}]
    more = sum(grown(data, at, o, size) for o in here)
    return more + max(sum(then.get(o.name, o.units) for o in here) for then in data.moments.get(w, ({},)))


def grown(data: Data, at: Assignment, workspace: Item, size: Size) -> int:
    """Pages that a workspace has beyond its own: the most that a step or any one dropped state needs of it."""
    dropped = [o.name for o in data.items if o.recomputable and any(at[o.name, w] == {"dropped"} for w in o.places)]
    again = [size.again.get(name, {}).get(workspace.name, 0) for name in dropped]
    return max(0, *(n - workspace.units for n in (*again, size.units.get(workspace.name, 0))))


def pinned_in(data: Data, at: Assignment, pool: str, w: str) -> int:
    """Pages in the pinned pool: host-backed objects are always there."""
    mine = (o for o in data.items if o.pool == pool)
    return sum(o.units for o in mine if o.host_backed or at.get((o.name, w)) == {"host"})


def turned(o: Item, at: Assignment, w: str) -> int:
    """1 where the object, moved as a whole, crosses the link on entering the window."""
    windows = list(o.places)
    index = windows.index(w)
    if o.recomputable or (index == 0 and not (o.cyclic and len(windows) > 1)):
        return 0
    before, now = at[o.name, windows[index - 1]], at[o.name, w]
    if now == {"hbm"}:
        return int(before != {"hbm"})
    return int(before == {"hbm"} and not o.host_backed)


def crossings(o: Item, at: Assignment, w: str) -> int:
    """How often all of the object crosses the link in a window."""
    return turned(o, at, w) + int(w in o.streams and at[o.name, w] == {"host"})


def busy(data: Data, at: Assignment, w: str) -> int:
    """Microseconds of transfers and recomputation: saved states stream behind the window's compute, together."""
    here = [o for o in data.items if w in o.places]
    streamed = sum(o.link_us for o in here if o.recomputable and w in o.streams and at[o.name, w] == {"host"})
    spent = max(0, streamed - data.compute_us[w]) + data.remap_us.get(w, 0)
    for o in here:
        if not o.recomputable:
            spent += o.link_us * crossings(o, at, w)
        elif at[o.name, w] == {"dropped"} and w == list(o.places)[-1]:
            spent += o.recompute_us
    return spent


def legal_assignments(data: Data) -> Iterator[Assignment]:
    """All of them."""
    slots = [(o.name, w) for o in data.items for w in o.places]
    choices = [sorted(o.places[w]) for o in data.items for w in o.places]
    for places in itertools.product(*choices):
        at: Assignment = {slot: frozenset({p}) for slot, p in zip(slots, places, strict=True)}
        if legal(data, at):
            yield at


def best(data: Data) -> dict[str, int] | None:
    """The lexicographic least of all legal assignments."""
    values = (worth(data, at) for at in legal_assignments(data))
    return min(values, key=lambda v: tuple(v.values()), default=None)


# ---- instances


@dataclass(frozen=True)
class Instance:
    """Numbers, and one assignment, legal or not."""

    data: Data
    at: Assignment


SMALL, TIMES = st.integers(1, 6), st.integers(0, 9)
FREE: list[frozenset[Place]] = [frozenset({"hbm"}), frozenset({"hbm", "host"}), frozenset({"host"})]
WORK = st.fixed_dictionaries({"work": st.integers(1, 9)})
SAVED = [frozenset(c) for n in (1, 2, 3) for c in itertools.combinations(PLACES, n)]


@st.composite
def items(draw: st.DrawFn, name: str, windows: tuple[str, ...]) -> Item:
    """A frozen weight, a permanent state, a saved state or a temporary; needed, free or elsewhere in each window."""
    recomputable, cyclic = draw(st.booleans()), draw(st.booleans())
    first = 0 if cyclic else draw(st.integers(0, len(windows) - 1))
    last = len(windows) if cyclic else draw(st.integers(first + 1, len(windows)))
    alive, always = windows[first:last], draw(st.sampled_from(SAVED))
    host_backed, link = draw(st.booleans()) and not recomputable, draw(TIMES)
    final = draw(st.sampled_from(("", *alive))) if not (recomputable or host_backed) else ""
    return Item(
        name=name,
        units=draw(SMALL),
        places={w: always if recomputable else draw(st.sampled_from(FREE)) for w in alive},
        pool=draw(st.sampled_from(("gpus", "gpus", "others"))),
        cyclic=cyclic and not recomputable,
        host_backed=host_backed,
        recomputable=recomputable,
        streams=frozenset(draw(st.sets(st.sampled_from(alive)))),
        link_us=link,
        recompute_us=draw(TIMES),
        final=final,
        early_us=draw(st.integers(0, link)),
    )


@st.composite
def workspaces(draw: st.DrawFn, windows: tuple[str, ...]) -> Item:
    """Temporaries from some window on, in which dropped states are made again."""
    alive = windows[draw(st.integers(0, len(windows) - 1)) :]
    return Item("work", draw(SMALL), {w: frozenset[Place]({"hbm"}) for w in alive}, pool="gpus")


@st.composite
def sizes(draw: st.DrawFn, responses: int, others: Sequence[Item]) -> Size:
    """Steps of so many responses: time, room in the workspace, and to make each saved state again."""
    again = {o.name: draw(WORK) for o in others if o.recomputable and draw(st.booleans())}
    return Size(responses, draw(TIMES), draw(st.one_of(st.just({}), WORK)), again)


@st.composite
def instances(draw: st.DrawFn) -> Instance:
    """Two to four windows, one to three objects, capacities that may be too small, stretches with slack.

    Now and then a workspace too, which larger steps need more of, and saved states that are made again.
    """
    windows = tuple("abcd")[: draw(st.integers(2, 4))]
    together = draw(st.integers(1, len(windows)))
    stretches = (windows[:together], *((w,) for w in windows[together:]))
    drawn = tuple(draw(items(f"o{i}", windows)) for i in range(draw(st.integers(1, 3))))
    moment = st.fixed_dictionaries({o.name: st.integers(0, o.units) for o in drawn[:2]})
    remade = draw(st.sampled_from(("", windows[-1])))
    steps: tuple[Size, ...] = (Size(),)
    if draw(st.booleans()):
        steps = tuple(draw(sizes(m, drawn)) for m in range(1, draw(st.integers(1, 3)) + 1))
        drawn = (*drawn, draw(workspaces(windows)))
    data = Data(
        windows=windows,
        items=drawn,
        capacity=draw(st.integers(0, 9)),
        host_capacity=draw(st.integers(0, 9)),
        stretches=tuple(Stretch(k, draw(TIMES)) for k in stretches),
        compute_us={w: draw(TIMES) for w in windows},
        moments={remade: tuple(draw(st.lists(moment, min_size=1, max_size=2)))} if remade else {},
        remap_us={remade: draw(TIMES)} if remade else {},
        sizes=steps,
    )
    return Instance(data, some_assignment(data, random.Random(draw(st.integers(0, 2**32)))))


def some_assignment(data: Data, rng: random.Random) -> Assignment:
    """Mostly legal: a place for life where one must stay, now and then a wrong one, none, or two."""
    at: Assignment = {}
    for o in data.items:
        life = rng.choice(sorted(next(iter(o.places.values()))))
        for w, places in o.places.items():
            one = life if o.recomputable and rng.random() < 0.9 else rng.choice(sorted(places))
            at[o.name, w] = (
                frozenset({one}) if rng.random() < 0.95 else frozenset(rng.choices(PLACES, k=2)[: rng.randint(0, 2)])
            )
    return at


# ---- the oracle


def disagreement(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    """In the optimum, in what the solution is worth, or about one assignment."""
    return _optimum(one.data, families, order) or _assignment(one, families, order)


def _optimum(data: Data, families: Sequence[Family[Model]], order: Order) -> str:
    model = constrain(Model(data), families)
    (solution, got), want = solve(model.cp, order(model.objectives())), best(data)
    if solution is None or want is None:
        return "" if solution is None and want is None else f"solvable: {solution is not None}, not {want is not None}"
    if got != want:
        return _differ("optimum", got, want)
    at: Assignment = {key: frozenset() for key in ((o.name, w) for o in data.items for w in o.places)}
    for name, places in read(model, solution).places.items():
        at |= {(name, w): frozenset[Place]({p}) for w, p in places.items()}
    return "" if legal(data, at) and worth(data, at) == want else "the solution is not worth its own objectives"


def _assignment(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    model = constrain(Model(one.data), families)
    for (name, w, place), literal in model.at.items():
        model.cp.add(literal == int(place in one.at[name, w]))
    solution, got = solve(model.cp, order(model.objectives()))
    if not legal(one.data, one.at):
        return "" if solution is None else "an illegal assignment is allowed"
    if solution is None:
        return "a legal assignment is refused"
    want = worth(one.data, one.at)
    return "" if got == want else _differ("an assignment", got, want)


def _differ(what: str, got: dict[str, int], want: dict[str, int]) -> str:
    name = next(n for n in OBJECTIVES if got[n] != want[n])
    return f"{what}: {name} {got[name]}, by enumeration {want[name]}"


def _wide_or_deep() -> Instance:
    """A saved state of 2: in HBM 2 over in three windows, in the pool 3 over in one, beside what is there already."""
    windows: tuple[str, ...] = ("a", "b", "c")
    saved = Item("saved", 2, dict.fromkeys(windows, frozenset({"hbm", "host"})), recomputable=True)
    pinned = Item("pinned", 3, {"a": frozenset({"host"})})
    stretches = tuple(Stretch((w,)) for w in windows)
    data = Data(windows, (saved, pinned), 0, 2, stretches, dict[str, int].fromkeys(windows, 0))
    return Instance(data, {key: frozenset() for key in ((o.name, w) for o in data.items for w in o.places)})


def _full(link_us: int) -> Instance:
    """Two objects of 10 fill a capacity of 20; one may leave, which takes seconds or bytes alone, and frees a tenth."""
    windows: tuple[str, ...] = ("a", "b")
    hbm: frozenset[Place] = frozenset({"hbm"})
    free: frozenset[Place] = frozenset({"hbm", "host"})
    items = (Item("fixed", 10, {"b": hbm}), Item("free", 10, {"a": hbm, "b": free}, link_us=link_us))
    stretches = tuple(Stretch((w,)) for w in windows)
    data = Data(windows, items, 20, 20, stretches, dict[str, int].fromkeys(windows, 0))
    return Instance(data, {key: frozenset() for key in ((o.name, w) for o in data.items for w in o.places)})


def _kept_beside_a_fetch() -> Instance:
    """An object stays where it became final; if it counted as gone in pieces, that would hide another's fetch."""
    windows: tuple[str, ...] = ("a", "b")
    hbm: frozenset[Place] = frozenset({"hbm"})
    kept = Item("kept", 1, dict.fromkeys(windows, hbm), link_us=5, final="a")
    fetched = Item("fetched", 1, {"a": frozenset({"host"}), "b": hbm}, link_us=5)
    stretches = tuple(Stretch((w,)) for w in windows)
    data = Data(windows, (kept, fetched), 9, 9, stretches, dict[str, int].fromkeys(windows, 0))
    return Instance(data, {key: frozenset() for key in ((o.name, w) for o in data.items for w in o.places)})


WITNESSES = (_wide_or_deep(), _full(link_us=5), _full(link_us=0), _kept_beside_a_fetch())
RESIDENCY = Oracle("residency", FAMILIES, OBJECTIVES, instances(), disagreement, WITNESSES)
