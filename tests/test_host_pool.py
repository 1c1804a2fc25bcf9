"""Static offsets of the pinned pool: lives in time, packings that are proven, and what the solver takes apart."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.first_fit import FirstFit
from rollplex.passes.offsets import FAMILIES, Model, Packing, pack
from rollplex.passes.offsets_data import Item, cliques, components, load, overlaps, throughout
from rollplex.passes.pipeline import compile_plan
from rollplex.passes.solver import constrain, minimise

NODE = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"


def items(text: str) -> list[Item]:
    """`a3:0-2 b1:1-4,6-8`: a has size 3 and is alive in times 0 and 1."""
    made = []
    for word in text.split():
        head, _, spans = word.partition(":")
        pairs = tuple(tuple(map(int, s.split("-"))) for s in spans.split(","))
        made.append(Item(head[0], int(head[1:]), pairs))  # type: ignore[arg-type]
    return made


def sound(found: Sequence[Item], packing: Packing) -> bool:
    """No two items that meet share an address, all lie inside, and the bound is no more than the size."""
    at, by = packing.offsets, {i.name: i for i in found}
    meet = [(found[i].name, found[j].name) for i, j in overlaps(found)]
    apart = all(at[a] + by[a].size <= at[b] or at[b] + by[b].size <= at[a] for a, b in meet)
    return apart and all(0 <= at[i.name] <= packing.size - i.size for i in found) and packing.bound <= packing.size


def least(found: Sequence[Item]) -> int:
    """The smallest pool: first fit over all orders gives every packing in which items rest on others."""
    fit = FirstFit(tuple(found))
    return min(fit.top(fit.place(order)) for order in itertools.permutations(range(len(found))))


# ---- time


def test_who_meets_whom() -> None:
    """a #### over b ## and c ## which do not meet; d comes later."""
    found = items("a1:0-4 b1:0-2 c1:2-4 d1:5-6")
    assert overlaps(found) == [(0, 1), (0, 2)]
    assert cliques(found) == [(0, 1), (0, 2), (3,)]
    assert [[i.name for i in part] for part in components(found)] == [["a", "b", "c"], ["d"]]
    assert [i.name for i in throughout(found[:3])] == ["a"]
    assert load(items("a3:0-2 b4:1-3 c5:2-4")) == 9


def test_an_item_may_live_twice() -> None:
    """b is gone while c is there; a meets both lives of b."""
    found = items("a1:0-9 b2:0-2,6-8 c2:3-5")
    packing = pack(found, seconds=5, seed=0)
    assert (packing.size, packing.proven) == (3, True)
    assert packing.offsets == {"a": 0, "b": 1, "c": 1}


# ---- packings

# time   0 1 2 3 4     five items in a ring, each meets two: two are alive at a time, and two addresses do not do,
# a      #       #     as two colours do not for a ring of five
# b      # #
# c        # #
# d          # #
# e            # #
RING = "a1:0-1,4-5 b1:0-2 c1:1-3 d1:2-4 e1:3-5"


def test_a_load_is_not_always_enough_and_the_solver_proves_it() -> None:
    """The least pool is above the load."""
    found = items(RING)
    packing = pack(found, seconds=20, seed=0)
    assert (load(found), packing.size, packing.bound) == (2, 3, 3)
    assert least(found) == 3


def drawn(rng: random.Random, n: int) -> list[Item]:
    """Random items of one life or two."""
    cuts = [sorted(rng.sample(range(9), rng.choice((2, 2, 4)))) for _ in range(n)]
    return [Item(f"i{i}", rng.randint(1, 6), tuple(zip(c[::2], c[1::2], strict=True))) for i, c in enumerate(cuts)]


@pytest.mark.parametrize("seed", range(40))
def test_packings_are_the_least_by_enumeration(seed: int) -> None:
    """Some packing of least size rests on its items, so all orders of first fit contain it."""
    rng = random.Random(seed)
    found = drawn(rng, rng.randint(1, 6))
    packing = pack(found, seconds=20, seed=0)
    assert sound(found, packing)
    assert packing.proven
    assert packing.size == least(found)


@pytest.mark.parametrize("seed", range(25))
def test_taking_apart_loses_nothing(seed: int) -> None:
    """The whole model without any taking apart has the same optimum."""
    rng = random.Random(100 + seed)
    found = [*drawn(rng, 8), Item("all", 2, ((0, 9),)), Item("twin", 2, ((0, 9),))]
    model = constrain(Model(found, sum(i.size for i in found)), FAMILIES)
    solution = minimise(model.cp, "oracle", model.objectives(), seconds=20, seed=0)
    assert solution is not None
    assert round(solution.results[0].value) == pack(found, seconds=20, seed=0).size


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(8, 40))
def test_larger_packings_are_sound(seed: int, n: int) -> None:
    """Whatever the search finds in a tenth of a second is a packing, and no less than its bound."""
    found = drawn(random.Random(seed), n)
    packing = pack(found, seconds=0.1, seed=0)
    assert sound(found, packing)
    assert packing.bound >= load(found)


def test_packings_repeat() -> None:
    found = drawn(random.Random(5), 30)
    assert pack(found, seconds=1, seed=0) == pack(list(found), seconds=1, seed=0)


def test_nothing_takes_no_room() -> None:
    assert pack([], seconds=1, seed=0) == Packing({}, 0, 0)


# ---- plans


def compiled(*overrides: str) -> Plan:
    return compile_plan(load_algorithm("examples/grpo.py"), load_job(NODE, ("workload.prompts=8", *overrides)))


def test_saved_state_and_gradients_take_turns() -> None:
    """The prefix's saved state is used up before the gradients are offloaded: one place for both."""
    summary = compiled("roles.actor.prefix_saved=host").summary
    at = {p.object: p for p in summary.host_pool.offsets}
    if summary.objects and "actor.gradients" in at:
        assert at["actor.gradients"].offset == at["actor.prefix_saved"].offset
    assert summary.host_pool.status == "optimal"
    assert summary.host_pool.bytes == summary.host_pool.bound_bytes == summary.peak_host_bytes
    assert {"actor.master", "actor.moments", "reference.weights", "actor.prefix_saved"} <= set(at)
    assert set(at["actor.master"].windows) == {w.name for w in summary.windows}


def test_a_plan_without_offloading_has_no_pool() -> None:
    """Naive overlap keeps everything in HBM; only frozen weights have their copy at the host."""
    pool = compiled("schedule=naive").summary.host_pool
    assert {p.object for p in pool.offsets} <= {"reference.weights", "reference.vision"}
