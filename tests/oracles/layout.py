"""Layout by enumeration: every combination of options, every placement of engines and ranks on GPUs."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from hypothesis import strategies as st

from oracles.base import Oracle, Order, solve
from rollplex.passes.layout import FAMILIES, Model
from rollplex.passes.layout_options import Option, View, WeightClass
from rollplex.passes.solver import Family, constrain

FIXED = ("buffer bytes", "layout seconds", "slabs a class", "engine order")
AUTO = ("layout and rent seconds", "slabs a class", "engine order")
VIEWS: tuple[View, ...] = get_args(View)
DEGREES = ((2, 1), (2, 2), (3, 1), (4, 2), (4, 1))


@dataclass(frozen=True)
class Choice:
    """Options taken by each class, and (engine, rank) pairs on each GPU: one of each where the choice is legal."""

    options: tuple[frozenset[str], ...]
    hosts: tuple[frozenset[tuple[int, int]], ...]


@dataclass(frozen=True)
class Instance:
    """Classes with options, degrees, the rent (None where bytes come first), and one choice."""

    classes: tuple[WeightClass, ...]
    tp_t: int
    tp_r: int
    rent_s: float | None
    choice: Choice

    @property
    def q(self) -> int:
        """Training ranks to a rollout rank, and rollout engines of a training group."""
        return self.tp_t // self.tp_r

    def model(self, families: Sequence[Family[Model]]) -> Model:
        """The CP-SAT model with some families."""
        return constrain(Model(self.classes, self.tp_t, self.tp_r, self.rent_s), families)


# ---- what a choice is worth


def legal(one: Instance, choice: Choice) -> bool:
    """One option a class; one rank a GPU and one GPU a rank; training rank g has a slab of rollout rank g // q."""
    if any(len(taken) != 1 for taken in (*choice.options, *choice.hosts)):
        return False
    hosted = [next(iter(h)) for h in choice.hosts]
    return len(set(hosted)) == one.tp_t and all(r == g // one.q for g, (_, r) in enumerate(hosted))


def worth(one: Instance, choice: Choice) -> dict[str, int]:
    """The objectives of a legal choice: KiB and microseconds."""
    taken = [o for c, names in zip(one.classes, choice.options, strict=True) for o in c.options if o.view in names]
    slabs = sum(o.slabs for o in taken)
    order = sum(abs(e - g % one.q) for g, host in enumerate(choice.hosts) for e, _ in host)
    if one.rent_s is not None:
        rented = sum(round(o.seconds * 1e6) + round(o.buffer_bytes * one.rent_s * 1e6) for o in taken)
        return dict(zip(AUTO, (rented, slabs, order), strict=True))
    nbytes, micro = sum(o.buffer_bytes >> 10 for o in taken), sum(round(o.seconds * 1e6) for o in taken)
    return dict(zip(FIXED, (nbytes, micro, slabs, order), strict=True))


def choices(one: Instance) -> Iterator[Choice]:
    """Every legal choice."""
    slots = [(e, r) for e in range(one.q) for r in range(one.tp_r)]
    options = [tuple(frozenset({o}) for o in views) for views in itertools.product(*_views(one.classes))]
    for hosts in itertools.permutations(slots):
        placed = tuple(frozenset({h}) for h in hosts)
        if legal(one, Choice(options[0], placed)):
            yield from (Choice(taken, placed) for taken in options)


def _views(classes: Sequence[WeightClass]) -> list[list[str]]:
    return [[o.view for o in c.options] for c in classes]


# ---- instances


@st.composite
def instances(draw: st.DrawFn, rent_s: float | None) -> Instance:
    """One to three classes of one to three options, small degrees, and a choice that is seldom quite legal."""
    views = st.lists(st.sampled_from(VIEWS), min_size=1, max_size=3, unique=True)
    classes = tuple(WeightClass(f"c{i}", (), 0, _options(draw, draw(views))) for i in range(draw(st.integers(1, 3))))
    tp_t, tp_r = draw(st.sampled_from(DEGREES))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return Instance(classes, tp_t, tp_r, rent_s, _some_choice(classes, tp_t, tp_r, rng))


def _options(draw: st.DrawFn, views: list[View]) -> tuple[Option, ...]:
    few, micro = st.integers(0, 3), st.integers(0, 5)
    return tuple(Option(v, "", draw(few) + 1, draw(few) << 20, draw(micro) * 1e-6, draw(micro) * 1e-6) for v in views)


def _some_choice(classes: Sequence[WeightClass], tp_t: int, tp_r: int, rng: random.Random) -> Choice:
    """A legal choice, or one in which a class takes all options, two GPUs trade hosts, share one, or one has both."""
    q = tp_t // tp_r
    options = [{rng.choice(views)} | (set(views) if rng.random() < 0.1 else set()) for views in _views(classes)]
    engines = [rng.sample(range(q), q) for _ in range(tp_r)]
    hosts = [{(engines[g // q][g % q], g // q)} for g in range(tp_t)]
    a, b = rng.randrange(tp_t), rng.randrange(tp_t)
    match rng.choice(("legal", "trade", "share", "both")):
        case "trade":
            hosts[a], hosts[b] = hosts[b], hosts[a]
        case "share":
            hosts[a] = hosts[b]
        case "both" if a != b:
            hosts[a], hosts[b] = hosts[a] | hosts[b], set()
    return Choice(tuple(frozenset(o) for o in options), tuple(frozenset(h) for h in hosts))


# ---- the oracle


def disagreement(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    """In the optimum, in what the solution is worth, or about one choice."""
    return _optimum(one, families, order) or _one(one, families, order)


def _optimum(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    model = one.model(families)
    solution, got = solve(model.cp, order(model.objectives()))
    if solution is None:
        return "not solvable"
    want = min((worth(one, c) for c in choices(one)), key=lambda v: tuple(v.values()))
    taken = tuple(frozenset(o.view for o in c.options if solution.true(model.x[c.name, o.view])) for c in one.classes)
    hosts = tuple(frozenset(slot for slot in model.slots if solution.true(model.y[g, *slot])) for g in range(one.tp_t))
    if not legal(one, choice := Choice(taken, hosts)):
        return "the solution is an illegal choice"
    return _differ("optimum", got, want) or _differ("the solution", got, worth(one, choice))


def _one(one: Instance, families: Sequence[Family[Model]], order: Order) -> str:
    model = one.model(families)
    for (name, view), literal in model.x.items():
        taken = next(t for c, t in zip(one.classes, one.choice.options, strict=True) if c.name == name)
        model.cp.add(literal == int(view in taken))
    for (g, e, r), literal in model.y.items():
        model.cp.add(literal == int((e, r) in one.choice.hosts[g]))
    solution, got = solve(model.cp, order(model.objectives()))
    if not legal(one, one.choice):
        return "" if solution is None else "an illegal choice is allowed"
    return "a legal choice is refused" if solution is None else _differ("a choice", got, worth(one, one.choice))


def _differ(what: str, got: dict[str, int], want: dict[str, int]) -> str:
    name = next((n for n in want if got[n] != want[n]), "")
    return f"{what}: {name} {got[name]}, by enumeration {want[name]}" if name else ""


# The engine order shares no variable with the other objectives: where it stands among them cannot matter.
LAYOUT = Oracle("layout", FAMILIES, FIXED[:-1], instances(None), disagreement)
LAYOUT_AUTO = Oracle("layout auto", FAMILIES, AUTO[:-1], instances(2e-12), disagreement)
