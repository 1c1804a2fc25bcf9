"""The checker: plans by hand pass, a fault is refused by the rule that it breaks, a harmless change is not."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import golden
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutants import MUTANTS, Mutant
from mutants.edit import move, put, steps, summarise, with_object
from mutants.plans import compiled
from tinygraph import centred
from tinyplan import tiny_plan, too_large, with_capacity
from tinysummary import VARIANTS
from turnplan import three_turns
from twoplan import two_roles

from rollplex.ir.checker import RULES, check_plan, verify_plan
from rollplex.ir.errors import PlanError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan, parse_plan
from rollplex.ir.steps import Barrier, MapPart, Run, Signal, Step, UnmapPart, UpdateChunk, Wait
from rollplex.passes.pipeline import compile_plan

SEVEN = "examples/jobs/critic_free_7b_h800x8.yaml"
TWO_CHUNKS = ("workload.prompts=8", "cluster.capacity_gib=46", "optimizer.chunks=2")
PLANS = {variant: tiny_plan(variant) for variant in VARIANTS} | {
    "too large": too_large(),
    "two roles": two_roles(),
    "three turns": three_turns(),
    "adapters": compiled("lora"),
    "streamed": compiled("streamed"),
    "rounds": compiled("dynamic sampling"),
    "gradients in pieces": compiled("four nodes"),
    "solved": compiled("solved"),
    "released": compiled("released"),
    "with group": compiled("with group"),
    "two chunks": compile_plan(load_algorithm("examples/grpo.py"), load_job(SEVEN, TWO_CHUNKS)),
}
NAMES = sorted(MUTANTS)


def kinds(plan: Plan) -> set[str]:
    return {v.kind for v in check_plan(plan)}


@pytest.mark.parametrize("name", PLANS)
def test_plans_by_hand_pass(name: str) -> None:
    """tinyplan.py draws them."""
    assert check_plan(PLANS[name]) == ()
    verify_plan(PLANS[name])


@lru_cache(maxsize=1)
def faults(name: str) -> st.SearchStrategy[Plan]:
    """Of all plans with a fault, thousands of some, one."""
    return st.sampled_from([made for plan in PLANS.values() for made in MUTANTS[name].make(plan)])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_fault_is_refused_by_its_rule(name: str, data: st.DataObject) -> None:
    """Any fault of mutants/, anywhere in any plan by hand."""
    made = data.draw(faults(name))
    found = kinds(made)
    assert found & MUTANTS[name].kinds, f"{name} gives {sorted(found) or 'nothing'}"


def test_every_rule_is_broken_by_some_fault() -> None:
    """A rule that no mutant breaks would not be tested."""
    assert set(RULES) - {kind for m in MUTANTS.values() for kind in m.kinds} == set()


def first_message(mutant: Mutant) -> str:
    """The first violation that the rule of a fault finds in the first plan that can have the fault."""
    made = next(m for plan in PLANS.values() for m in mutant.make(plan))
    return str(next(v for v in check_plan(made) if v.kind in mutant.kinds))


def test_messages() -> None:
    """Where, what, how much, which rule, and what to try: one message a kind of fault."""
    text = "\n".join(f"{name}\n  {first_message(MUTANTS[name])}\n" for name in NAMES)
    golden.check("checker_messages.txt", text)


def test_all_violations_are_reported_at_once() -> None:
    """Two faults in two programs: one error with both."""
    plan = tiny_plan()
    fetch = next((p, i) for p, i, s in steps(plan) if s.kind == "fetch")
    publish = next((p, i) for p, i, s in steps(plan) if s.kind == "publish")
    broken = put(put(plan, *publish), *fetch)
    with pytest.raises(PlanError) as caught:
        verify_plan(broken)
    assert len(caught.value.problems) == len(check_plan(broken)) >= 2
    assert "train step 1 (run prefix reference mb 0) in P1 prefix-reference" not in str(caught.value)
    assert "it reads reference.weights, which is not mapped" in str(caught.value)
    assert "theta_k+1 of actor is never published" in str(caught.value)


# ---- what does no harm is accepted


def independent(a: Step, b: Step, taken_in_turn: frozenset[str]) -> bool:
    """Neighbours that may change places: no meeting, no value and no page of one matters to the other.

    Of an object that groups take in turn there is room for one of them.
    """
    if isinstance(a, Barrier | Wait | Signal) or isinstance(b, Barrier | Wait | Signal) or a.window != b.window:
        return False
    if isinstance(a, Run) and isinstance(b, Run):
        if a.offloads or b.offloads:  # the pages that leave beside a backward are those that the others write
            return False
        if set(a.outputs) & set(b.inputs):  # a round samples what the mask of the one before leaves
            return False
        if named(a) & named(b) & taken_in_turn:
            return False
        return "grad_norm" not in (a.task, b.task) and a.microbatch != b.microbatch
    if isinstance(a, MapPart | UnmapPart) and isinstance(b, MapPart | UnmapPart):  # what is there at once is told
        return False
    return not named(a) & named(b) and "publish" not in (a.kind, b.kind)


def named(step: Step) -> set[str]:
    lists = (getattr(step, field, ()) for field in ("reads", "writes", "streams"))
    return {name for names in lists for name in names} | {getattr(step, "object", "")} - {""}


def swaps(plan: Plan) -> list[tuple[str, int]]:
    """Every pair of neighbours that may change places."""
    with_group = [role for role, section in plan.job["roles"].items() if section.get("prefix_saved") == "group"]
    taken_in_turn = frozenset(f"{role}.{what}" for role in with_group for what in ("prefix_saved", "boundary"))
    return [
        (p, i)
        for p, program in plan.programs.items()
        for i, (a, b) in enumerate(pairwise(program))
        if independent(a, b, taken_in_turn)
    ]


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(sorted(PLANS)), data=st.data())
def test_independent_steps_may_change_places(name: str, data: st.DataObject) -> None:
    """map a, map b = map b, map a; group 0, group 1 = group 1, group 0; an unmap may come later in its window."""
    plan = PLANS[name]
    for _ in range(data.draw(st.integers(1, 8))):
        process, i = data.draw(st.sampled_from(swaps(plan)))
        a, b = plan.programs[process][i : i + 2]
        plan = put(put(plan, process, i, b), process, i + 1, a)
    assert check_plan(plan) == ()


def test_a_larger_gpu_is_no_violation() -> None:
    plan = tiny_plan()
    assert check_plan(with_capacity(plan, plan.summary.capacity_bytes + 1)) == ()


def test_saved_state_may_stay_at_the_host_or_be_recomputed() -> None:
    """The serial plan recomputes what the rollplex plan keeps; neither may be had without recomputing or keeping."""
    assert check_plan(tiny_plan("serial")) == ()
    assert "saved-state" in kinds(with_object(tiny_plan("serial"), "actor.prefix_saved", recomputable=False))
    assert check_plan(with_object(tiny_plan(), "actor.prefix_saved", recomputable=False)) == ()


def test_a_loss_over_all_prompts_needs_the_values_of_all() -> None:
    """suffix 0, train 0, suffix 1, train 1: train 0 has its own reference value, a wide loss needs both."""
    plan = tiny_plan("serial")
    suffix = next(i for _, i, s in steps(plan, Run) if s.task == "suffix" and s.microbatch == 1)
    train = next(i for _, i, s in steps(plan, Run) if s.task == "train" and s.microbatch == 1)
    assert check_plan(centred(plan)) == ()
    late = move(plan, "train", suffix, train - 1)
    assert "missing-value" not in kinds(late)
    assert "missing-value" in kinds(centred(late))


def test_the_checker_imports_no_pass_solver_or_tensor() -> None:
    """It must not share code with what it judges, and a worker or `verify` must not pay for more."""
    code = "import sys, rollplex.ir.checker; print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "ortools", "networkx", "rollplex.passes", "rollplex.backends", "rollplex.runtime"} & set(out)


# ---- robustness


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(sorted(PLANS)), data=st.data())
def test_the_checker_never_crashes(name: str, data: st.DataObject) -> None:
    """Steps moved into any program, with fields of any other step: refused or accepted, never a traceback."""
    plan = PLANS[name]
    for _ in range(data.draw(st.integers(1, 4))):
        process, i, step = data.draw(st.sampled_from(list(steps(plan))))
        _, _, other = data.draw(st.sampled_from(list(steps(plan))))
        field = data.draw(st.sampled_from(sorted(type(step).model_fields)))
        changed = step.model_copy(update={field: getattr(other, field)}) if hasattr(other, field) else step
        if field == "kind":
            changed = other
        plan = put(plan, process, i, *data.draw(st.sampled_from([(changed,), (), (step, changed), (changed, other)])))
    check_plan(plan)


@pytest.mark.parametrize("field", ["objects", "windows"])
def test_an_empty_summary_is_refused(field: str) -> None:
    assert check_plan(summarise(tiny_plan(), **{field: ()}))


@pytest.mark.parametrize("process", ["train", "rollout", "controller"])
def test_an_empty_program_is_refused(process: str) -> None:
    plan = tiny_plan()
    assert check_plan(plan.model_copy(update={"programs": {**plan.programs, process: ()}}))


def test_a_plan_from_a_file_is_judged_the_same() -> None:
    """Plan -> JSON -> plan keeps every verdict."""
    for plan in PLANS.values():
        assert check_plan(parse_plan(json.loads(plan.to_json()))) == ()
    broken = next(MUTANTS["fetch_dropped"].make(tiny_plan()))
    assert check_plan(parse_plan(json.loads(broken.to_json()))) == check_plan(broken)


# ---- size


def long_plan(groups: int, chunks: int) -> Plan:
    """The rollplex plan with many prompt groups and chunks; the rollout program gets as many steps."""
    plan = tiny_plan()
    programs = {p: tuple(s for step in ss for s in more(step, groups, chunks)) for p, ss in plan.programs.items()}
    plan = plan.model_copy(update={"programs": programs})
    for name in ("reference.boundary", "actor.boundary", "actor.prefix_saved"):
        plan = with_object(plan, name, slots=groups)
    for name, nbytes in (("actor.gradients", 4 * chunks), ("actor.master", 4 * chunks)):
        plan = with_object(plan, name, bytes=nbytes)
    sizes = plan.summary.chunks.optimizer.model_copy(update={"count": chunks, "elements": 1, "bytes": 16})
    return summarise(plan, chunks=plan.summary.chunks.model_copy(update={"optimizer": sizes}))


def more(step: Step, groups: int, chunks: int) -> Sequence[Step]:
    """A step of group 0 for every group, of chunk 0 for every chunk; an event of rollout for every group."""
    if isinstance(step, Run) and step.task in ("prefix", "suffix", "train", "prefix_backward"):
        again = [step.model_copy(update={"microbatch": m}) for m in range(groups)]
        return again if step.microbatch == 0 else []
    if isinstance(step, UpdateChunk):
        again = [step.model_copy(update={"index": i, "start": i, "stop": i + 1}) for i in range(chunks)]
        return again if step.index == 0 else []
    if isinstance(step, Signal) and step.event == "rollout":
        return [step, *(step.model_copy(update={"event": f"response {i}", "carries": ()}) for i in range(3 * groups))]
    if isinstance(step, Wait) and step.event == "rollout":
        return [step, *(step.model_copy(update={"event": f"response {i}"}) for i in range(3 * groups))]
    return [step]


def test_long_programs_are_checked_in_seconds() -> None:
    """Programs of thousands of steps, of which thousands synchronise: at most 3 s of CPU, and only bytes differ."""
    plan = long_plan(groups=600, chunks=600)
    assert len(plan.programs["train"]) > 3000
    began = time.process_time()
    found = kinds(plan)
    assert time.process_time() - began < 3
    allowed = {"window-bytes", "host-bytes", "peak", "event", "host-capacity", "capacity", "asked", "host-offset"}
    allowed |= {"size"}  # more prompts, and objects of as many bytes as before
    assert found <= {*allowed, "chunk-cover"}
