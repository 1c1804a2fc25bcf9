"""Parallel degrees that a job leaves to the compiler: the best of all legal choices, and how the others compare."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from golden import check
from job_texts import GOOD, TINY_CONFIG, edited, refusal, write

from rollplex.ir.errors import JobError, PassError
from rollplex.ir.job import Job, load_job
from rollplex.ir.job_auto import load_jobs
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan
from rollplex.passes.degrees import compile_best
from rollplex.passes.pipeline import compile_plan
from rollplex.show.degrees import degree_lines, spelled

ALGORITHM, FILE = "examples/grpo.py", "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
TRAIN, ROLLOUT, SCORE = (f"roles.{k}.tensor_parallel" for k in ("actor.train", "actor.rollout", "reference.score"))
CASES = {
    "32b on one node": (TRAIN, ROLLOUT),
    "7b, all three": (TRAIN, ROLLOUT, SCORE, "model=Qwen2.5-VL-7B"),
    "32b on four nodes": (TRAIN, ROLLOUT, "cluster.nodes=4"),
    "nothing fits": (TRAIN, ROLLOUT, "cluster.capacity_gib=40"),
}


def auto(*keys: str) -> list[str]:
    """Overrides: keys without a value are left to the compiler."""
    return [k if "=" in k else f"{k}=auto" for k in keys]


def compiled(*keys: str) -> Plan:
    return compile_best(load_algorithm(ALGORITHM), load_jobs(FILE, auto(*keys)))


def legal_by_hand(*keys: str) -> dict[tuple[int, ...], Job]:
    """Every explicit choice of 1..8 that `load_job` takes, one file and its overrides at a time."""
    free, fixed = [k for k in keys if "=" not in k], [k for k in keys if "=" in k]
    found = {}
    for values in itertools.product(range(1, 9), repeat=len(free)):
        try:
            found[values] = load_job(FILE, [*fixed, *(f"{k}={v}" for k, v in zip(free, values, strict=True))])
        except JobError:
            continue
    return found


@pytest.mark.parametrize("keys", CASES.values(), ids=CASES)
def test_the_choice_is_the_best_of_all_explicit_plans(keys: tuple[str, ...]) -> None:
    """Compile every explicit combination by itself: same set, same figures, same winner."""
    plans = {v: compile_plan(load_algorithm(ALGORITHM), job) for v, job in legal_by_hand(*keys).items()}
    plan = compiled(*keys)
    s = plan.summary
    told = {tuple(c.degrees.values()): c for c in s.runners_up}
    assert {*told, tuple(s.degrees.values())} == set(plans)
    fits = {v: p.summary for v, p in plans.items() if p.feasible}
    assert plan.feasible == bool(fits)
    for values, c in told.items():
        assert c.feasible == (values in fits)
        if c.compiled:
            assert (c.step_s, c.peak_bytes) == (
                plans[values].summary.times.step_s,
                plans[values].summary.peak_hbm_bytes,
            )
        else:
            assert plans[values].summary.peak_hbm_bytes >= c.peak_bytes > s.capacity_bytes
    if fits:
        best = min(fits, key=lambda v: (fits[v].times.step_s, fits[v].peak_hbm_bytes, v))
        assert tuple(s.degrees.values()) == best


def test_the_choice_can_be_pinned() -> None:
    """The degrees of the plan as overrides give the same plan, without the comparison."""
    plan = compiled(TRAIN, ROLLOUT)
    pins = [f"{k}={v}" for k, v in plan.summary.degrees.items()]
    pinned = compile_plan(load_algorithm(ALGORITHM), load_job(FILE, pins))
    bare = plan.summary.model_copy(update={"degrees": {}, "runners_up": ()})
    assert pinned == plan.model_copy(update={"summary": bare})


def test_where_nothing_fits_the_choice_that_lacks_least_is_explained() -> None:
    """40 GiB for 32 B: the plan is the least short, and the others say what they lack."""
    plan = compiled(TRAIN, ROLLOUT, "cluster.capacity_gib=40")
    assert plan.infeasible is not None
    compiled_ones = [c for c in plan.summary.runners_up if c.compiled]
    assert compiled_ones
    assert all(c.peak_bytes >= plan.summary.peak_hbm_bytes for c in compiled_ones)
    assert all(" GiB over in P" in c.why_not for c in compiled_ones)
    unseen = [c for c in plan.summary.runners_up if not c.compiled]
    assert {c.degrees[ROLLOUT] for c in unseen} == {1}
    assert unseen[0].why_not == "weights alone: 61.0 GiB of a GPU's 40.0 GiB"
    assert unseen[0].step_s is None


def test_the_comparison_is_printed() -> None:
    """Chosen, of how many, the next four, and the overrides that pin it."""
    plans = [compiled(TRAIN, ROLLOUT), compiled(TRAIN, ROLLOUT, SCORE, "cluster.capacity_gib=40")]
    check("degrees.txt", "\n\n".join("\n".join(t.plain for t in degree_lines(p)) for p in plans) + "\n")


def test_a_job_with_all_degrees_prints_no_comparison() -> None:
    """Nothing was left to choose."""
    assert degree_lines(compile_plan(load_algorithm(ALGORITHM), load_job(FILE))) == []


def test_roles_and_engines_are_named_once() -> None:
    """`actor train TP8 PP2, rollout TP4; reference score TP8`."""
    degrees = {TRAIN: 8, "roles.actor.train.pipeline_parallel": 2, ROLLOUT: 4, SCORE: 8}
    assert spelled(degrees) == "actor train TP8 PP2, rollout TP4; reference score TP8"


def test_the_file_may_say_auto(tmp_path: Path) -> None:
    """As a value in YAML; one job of the set for every legal degree."""
    (tmp_path / "job.yaml").write_text(GOOD.replace("      tensor_parallel: 4\n", "      tensor_parallel: auto\n"))
    found = load_jobs(tmp_path / "job.yaml")
    assert found.keys == (ROLLOUT,)
    assert found.degrees == ((1,), (2,), (4,), (8,))
    assert [job.rollout_tp for job in found.jobs] == [1, 2, 4, 8]


def test_one_job_is_asked_for() -> None:
    """`load_job` has no compiler to choose."""
    with pytest.raises(JobError, match=rf"{FILE}: {ROLLOUT}: auto leaves 4 jobs to choose from"):
        load_job(FILE, auto(ROLLOUT))


WRONG = {
    "another engine's degree": (["roles.actor.rollout.zero_parallel=auto"], "unknown key `zero_parallel`"),
    "a word": ([f"{TRAIN}=most"], "`tensor_parallel` is 'most'; expected a whole number, or auto"),
    "beside a typing mistake": (auto(TRAIN, "workload.promts=32"), "unknown key `promts`\n    try: prompts"),
    "beside a wrong value": (auto(TRAIN, "workload.prompts=-1"), "`prompts` is -1; must be at least 1"),
    "no choice": (
        auto(TRAIN, ROLLOUT, SCORE, "workload.prompts=3", "cluster.nodes=4"),
        "none of 64 choices of degrees is legal; the nearest to it fails by what follows",
    ),
    "whatever the choice": (
        auto(TRAIN, "workload.prompt_median=9999"),
        "prompt_median 9999 exceeds the budget",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_told_once(case: str, tmp_path: Path) -> None:
    """However many choices there are: what all of them lack, else what the nearest does."""
    overrides, message = WRONG[case]
    told = str(refusal(tmp_path, GOOD, *overrides))
    assert told.count(message) == 1
    assert case != "whatever the choice" or told.count("--set") == 1


def small(directory: Path, *overrides: str) -> Plan:
    """A model of a hundred thousand parameters, whose optimizer chunks are few units of 64."""
    (directory / "tiny").mkdir()
    (directory / "tiny/config.json").write_text(json.dumps(TINY_CONFIG))
    edits = [("Qwen2.5-VL-32B", "tiny"), ("  frames: 16\n", ""), ("    freeze: [vision]\n", "")]
    file = write(directory, edited(*edits, ("      tensor_parallel: 4\n", "      tensor_parallel: 1\n")))
    jobs = load_jobs(file, [f"{SCORE}=1", f"{TRAIN}=auto", *overrides])
    return compile_best(load_algorithm(ALGORITHM), jobs)


def test_a_choice_that_a_pass_refuses_is_told_among_the_others(tmp_path: Path) -> None:
    """35 chunks can be made of a rank's parameters at TP1 and TP4, not at TP2."""
    plan = small(tmp_path, "optimizer.chunks=35")
    refused = [c for c in plan.summary.runners_up if not c.feasible]
    assert [c.degrees[TRAIN] for c in refused] == [2]
    assert refused[0].why_not == "679 x 64 parameters of a rank do not make 35 equal chunks"


def test_what_a_pass_refuses_for_every_choice_is_an_error(tmp_path: Path) -> None:
    """58 chunks can be made at no degree."""
    with pytest.raises(PassError, match="do not make 58 equal chunks"):
        small(tmp_path, "optimizer.chunks=58")


def test_two_compilations_in_two_processes_give_the_same_bytes() -> None:
    """Whatever order sets and dictionaries of the interpreter have."""
    command = [sys.executable, "-m", "rollplex.cli", "compile", ALGORITHM, "--job", FILE, "--json"]
    command += auto(TRAIN, ROLLOUT)
    outputs = {
        subprocess.run(command, capture_output=True, check=False, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "77")
    }
    assert len(outputs) == 1
    assert len(outputs.pop()) > 10_000
