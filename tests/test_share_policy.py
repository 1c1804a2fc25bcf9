"""Sharing solved from the surface that one H200 gave: no stated way is better, the checker sees every fault of a table.

tests/data/h200_3b.json   decode batch x prefix chunk x SMs of one H200 (vLLM 0.20.2 with CUDA graphs beside prefix
                          forwards of transformers); rates of GEMMs, attention, HBM beside it are round figures
"""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import product
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pytest
from mutants.edit import summarise
from mutants.plans import CALIBRATED, SOLVED
from mutants.sharing import result_of_another_table, row_that_prefixes_do_not_wait_in, with_policy, with_row

from rollplex import api
from rollplex.ir.calibration import Surface, read_calibration
from rollplex.ir.check.sharing import both_s
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import JobError
from rollplex.ir.job import Job, load_job
from rollplex.ir.plan import Plan, SolverResult
from rollplex.passes import co_run_search
from rollplex.passes.co_run import WAIT, Part, Way, co_run, solved
from rollplex.passes.co_run_search import POINTS, Point
from rollplex.show.page import plan_page
from rollplex.show.sharing import policy_lines

STEP = ("workload.prompts=16",)


@cache
def surface() -> Surface:
    found = read_calibration(CALIBRATED).surface
    assert found
    return found


def compiled(tmp_path: Path, *overrides: str) -> Plan:
    path = tmp_path / "job.yaml"
    path.write_text(SOLVED)
    return api.compile_files("examples/grpo.py", path, [*STEP, *overrides]).plan


def job_of(tmp_path: Path, *overrides: str) -> Job:
    path = tmp_path / "job.yaml"
    path.write_text(SOLVED)
    return load_job(path, overrides)


def p1_s(plan: Plan) -> float:
    times = plan.summary.times
    return times.decode_s + times.interference_s + max(times.prefix_s - plan.summary.policy.hidden_s, 0.0)


# ---- what the surface gives


def test_the_tail_hides_what_a_full_batch_cannot() -> None:
    """80 SMs at batch 4 hide more of the prefixes for what they cost than any way at batch 64: the table waits for it.

    From the table by hand: at batch 4 a step is 6.04 / 4.34 as long and prefixes run at 7.12 / 11.54 of their rate.
    """
    beside = surface().beside(4, 6000, 80)
    assert beside.slower == pytest.approx(6.04 / 4.34)
    assert beside.rate == pytest.approx(7.12 / 11.54)
    ways = [Way(6000, sms) for sms in (64, 80, 96, 132)]
    parts = (Part(64, 3.0, 0), Part(4, 5.0, 600))
    found = solved(surface(), parts, 4.0, ways)
    assert [row.sms for row in found.rows] == [0, 80]
    assert [row.from_tokens for row in found.rows] == [0, 600]
    assert found.hidden_s == pytest.approx(4.0)
    assert found.rows[1].decode_s == pytest.approx(5.0 + 4.0 * 11.54 / 7.12 * (1 - 4.34 / 6.04), abs=1e-5)


@pytest.mark.parametrize("prefix_s", [0.3, 2.0, 6.0, 20.0])
@pytest.mark.parametrize("chunk", [1024, 2048, 6000])
def test_no_table_of_the_surface_is_better(chunk: int, prefix_s: float) -> None:
    """All 5^4 tables of four parts, by the checker's own replay; those of one way among them."""
    parts = (Part(128, 2.0, 0), Part(40, 2.5, 200), Part(11, 1.5, 500), Part(2, 3.0, 900))
    ways = [Way(chunk, sms) for sms in surface().sms(chunk)]
    found = solved(surface(), parts, prefix_s, ways)
    rows = found.rows
    least = min(both_s(surface(), rows, prefix_s, table) for table in product([WAIT, *ways], repeat=4))
    assert found.both_s == pytest.approx(least, abs=1e-5)
    for way in ways:
        assert found.both_s <= co_run(surface(), parts, prefix_s, [way] * 4).both_s + 1e-5


def test_a_table_goes_on_behind_the_predicted_end() -> None:
    """Little prefix work ends in the first part: should there be more, the others run by the cheapest way.

    At batch 4 a second hidden costs 0.450 s on 64 SMs, 0.456 s on 80, 0.83 s without a partition.
    """
    parts = (Part(4, 5.0, 0), Part(2, 3.0, 600))
    found = solved(surface(), parts, 0.5, [Way(6000, sms) for sms in (64, 80, 96, 132)])
    assert found.rows[0].hidden_s == pytest.approx(0.5)
    assert [row.sms for row in found.rows] == [64, 64]
    assert found.rows[1].hidden_s == 0.0
    assert found.prefix_ends_s < 2.0


# ---- where a row begins

FIXED, MPS = "sharing={kind: fixed, share: 0.5}", "sharing={kind: mps}"
WIDE, OVERSAMPLE = "workload.response_median=100", "workload.rollout={kind: oversample, factor: 1.5}"


def drawn(median: int, spread: float, longest: int, count: int) -> list[float]:
    """Tokens of as many responses, one at each of the distribution's quantiles; the longest of all is `longest`."""
    quantile = NormalDist(math.log(median), spread).inv_cdf
    return [min(math.exp(quantile(k / count)), longest) for k in range(1, count)] + [longest]


def by_hand(lengths: list[float], ends: float, budget: int) -> dict[int, int]:
    """From which token on a row must hold, by what decodes in it: counted at the 32 beginnings of decode's parts."""
    found: dict[int, int] = {}
    for part in range(32):
        begins = part * ends / 32
        found.setdefault(sum(length > begins for length in lengths), math.ceil(round(budget - ends + begins, 6)))
    return found


@pytest.mark.parametrize("name", ["fills the budget", "a fixed share", "ends before", "cut"])
def test_a_row_holds_from_the_token_that_its_budget_says(name: str, tmp_path: Path) -> None:
    """Where decode is predicted to end at the budget, from its own beginning; else as much later.

    Of 128 responses the longest is at the quantile 1 - 1/256, 2.66 deviations: exp(2.66 s) = 1185 / 340 has s 0.469;
    at most 0.6, the longest of median 100 has 494 tokens. Of 24 prompts 16 are complete when 2/3 = F^8, 738 tokens.
    """
    changes, median, spread, longest, ends, engine = {
        "fills the budget": ((), 340, 0.46939, 1185, 1185.0, 128),
        "a fixed share": ((FIXED,), 340, 0.46939, 1185, 1185.0, 128),
        "ends before": ((WIDE, MPS), 100, 0.6, 494, 494.0, 128),
        "cut": ((OVERSAMPLE, MPS), 340, 0.46939, 1185, 737.7754, 192),
    }[name]
    plan = compiled(tmp_path, *changes)
    due = by_hand(drawn(median, spread, longest, engine), ends, 1185)
    assert {row.live_at_most: row.from_tokens for row in plan.summary.policy.rows} == due
    assert len(due) > 20


def test_no_step_outlasts_what_the_rows_behind_a_token_were_to_take(tmp_path: Path) -> None:
    """By the lengths that one H200 gave: five of 32 fill the budget, and the last rows hold 81 tokens sooner for it."""
    step = ("workload.prompts=4", "workload.response_tokens=512", "workload.response_median=294")
    rows = compiled(tmp_path, *step).summary.policy.rows
    lengths = [75, 78, 79, 137, 152, 161, 163, 165, 184, 205, 214, 218, 220, 247, 291, 304, 317, 317, 337, 337, 344]
    lengths += [362, 364, 366, 368, 377, 465, *[512] * 5]
    at = next(row for row in rows if row.live_at_most == 5)
    few = next(t for t in range(513) if sum(length > t for length in lengths) <= 5)
    assert (at.from_tokens, few) == (384, 465)
    behind = [sum(row.alone_s for row in rows[i:]) for i in (1, rows.index(at))]  # the first has the prefill too
    tokens = [512 - row.from_tokens for row in (rows[1], at)]
    assert behind[1] / behind[0] == pytest.approx(tokens[1] / tokens[0], rel=0.2), "its part of decode in tokens"


# ---- in a plan


def test_solved_is_no_worse_than_mps_or_any_share(tmp_path: Path) -> None:
    """On one surface, whole plans: P1 and the step; MPS default is what the solved plan says it is."""
    best = compiled(tmp_path)
    mps = compiled(tmp_path, "sharing={kind: mps}")
    assert best.summary.policy.mps_s == pytest.approx(p1_s(mps), abs=1e-4)
    stated = {sms: compiled(tmp_path, f"sharing={{kind: fixed, share: {sms / 132}}}") for sms in (64, 80, 96)}
    for sms, plan in stated.items():
        assert {row.sms for row in plan.summary.policy.rows} == {sms}
    for other in (mps, *stated.values()):
        assert p1_s(best) <= p1_s(other) + 1e-4
        assert best.summary.times.step_s <= other.summary.times.step_s + 1e-3
        assert not check_plan(other)
    assert best.summary.times.step_s < 0.97 * mps.summary.times.step_s
    assert best.summary.times.step_s < best.summary.times.serial_s


FAT = {"partial": "workload.rollout={kind: partial, share: 0.5}", "oversample": OVERSAMPLE, "wide": WIDE}
"""Jobs whose decode has no thin tail: one way to run prefixes is nearly as good as another in most of its parts."""


def searched(plan: Plan) -> SolverResult:
    (found,) = (s for s in plan.summary.solvers if s.name == "share-policy")
    return found


@pytest.mark.parametrize("name", FAT)
def test_a_decode_without_a_thin_tail_is_solved(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within POINTS points a part, and the checker, which tries every change of a row, knows no better."""
    grown = count_grown(monkeypatch)
    co_run_search.best_table.cache_clear()
    plan = compiled(tmp_path, FAT[name])
    assert not check_plan(plan)
    assert 0 < len(grown) <= 32 * POINTS
    found = searched(plan)
    assert found.value == pytest.approx(p1_s(plan), abs=1e-4)
    assert plan.summary.policy.mps_s
    assert found.value < plan.summary.policy.mps_s - 0.1
    assert (found.status == "optimal") == (found.bound == found.value) == (name != "partial")
    assert found.value - 0.003 < found.bound <= found.value


def count_grown(monkeypatch: pytest.MonkeyPatch) -> list[Point]:
    """Every point that the search goes on from, of all searches of a compilation."""
    found, grown = list[Point](), co_run_search._grown
    monkeypatch.setattr(co_run_search, "_grown", lambda point, *rest: (found.append(point), grown(point, *rest))[1])
    return found


def test_what_is_not_proven_is_told_so(tmp_path: Path) -> None:
    """On the page, with the bound; every fault of a result and of a table is seen beside it as beside an optimum."""
    plan = compiled(tmp_path, FAT["partial"])
    page = "\n".join(text.plain for text in plan_page(plan))
    assert "solved: the best table of the surface that was found; no change of one row is better" in page
    told = next(line for line in page.splitlines() if "share-policy" in line)
    assert "feasible" in told
    assert "(bound " in told
    for make in (result_of_another_table, row_that_prefixes_do_not_wait_in):
        assert all(check_plan(wrong) for wrong in make(plan))


def test_a_bound_that_nothing_proves_is_refused(tmp_path: Path) -> None:
    """The checker's comes from prices of a second of prefix work, the search's from fractions of ways."""
    plan = compiled(tmp_path, FAT["partial"])
    found = searched(plan)
    takes, least = found.value + 0.001, found.bound - 0.001
    for changes, message in (
        ({"bound": least}, f"its bound is {least:.6f} s, that of all tables {str(found.bound)[:6]}"),
        ({"value": takes}, f"P1 seconds: {takes:.6f}, the table takes P1 {str(found.value)[:6]}"),
    ):
        others = [s.model_copy(update=changes) if s == found else s for s in plan.summary.solvers]
        (violation,) = check_plan(summarise(plan, solvers=tuple(others)))
        assert (violation.kind, violation.what.startswith(message)) == ("solver", True), violation.what
    without = check_plan(summarise(plan, solvers=tuple(s for s in plan.summary.solvers if s != found)))
    assert [v.what for v in without] == ["solved sharing is solved once if it is solved, and has 0 results"]


def test_the_step_without_a_surface_is_told_as_before(tmp_path: Path) -> None:
    """No calibration: no table, and decode's slowdown is the assumed one."""
    plan = compiled(tmp_path, "cluster.calibration=null", "sharing={kind: mps}")
    assert (plan.summary.policy.rows, plan.summary.policy.surface, plan.summary.policy.mps_s) == ((), "", None)
    times = plan.summary.times
    assert times.interference_s == pytest.approx(0.021 * min(times.decode_s, times.prefix_s), abs=1e-5)


def test_what_runs_one_after_the_other_shares_nothing(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "schedule=serial")
    assert (plan.summary.policy.kind, plan.summary.policy.rows) == ("none", ())
    assert not check_plan(plan)


def test_predictions_rest_on_what_was_measured(tmp_path: Path) -> None:
    """Decode steps are the file's; twice the step, twice the decode; the link is the measured one."""
    assert job_of(tmp_path).device.host_link_gb_s == 50.5
    before = compiled(tmp_path).summary.times
    data = json.loads(CALIBRATED.read_text())
    for row in data["decode"]:
        row["seconds"] *= 2
    data["gemm"] = [{**row, "tflops": row["tflops"] / 2} for row in data["gemm"]]
    data["attention"] = [{**row, "tflops": row["tflops"] / 2} for row in data["attention"]]
    (tmp_path / "slow.json").write_text(json.dumps(data))
    after = compiled(tmp_path, "cluster.calibration=slow.json").summary.times
    assert after.decode_s == pytest.approx(2 * before.decode_s, rel=0.01)
    assert after.prefix_s == pytest.approx(2 * before.prefix_s, rel=0.01)


def test_the_page_tells_the_table(tmp_path: Path) -> None:
    """Neighbouring rows of one way are told as one; the sum of both sides stands beside MPS default's."""
    plan = compiled(tmp_path)
    told = "\n".join(text.plain for text in policy_lines(plan))
    policy = plan.summary.policy
    assert told.startswith("policy     solved: the table of the surface under which decode and prefixes end first")
    assert f"{policy.hidden_s / plan.summary.times.prefix_s:.0%} of the prefix work is done beside decode" in told
    assert "under MPS default" in told
    assert "responses that decode: SMs for prefixes of 6000 tokens" in told
    assert "to 1: 80" in told or "1: 96" in told
    begins = next(row for row in policy.rows if row.sms)
    assert f"from token {begins.from_tokens}, or {begins.live_at_most}" in told.replace("\n" + " " * 11, " ")
    assert all(len(text.plain) <= 100 for text in plan_page(plan))
    assert "solver     " in "\n".join(text.plain for text in plan_page(plan))


def test_what_goes_beyond_the_file_is_told(tmp_path: Path) -> None:
    plan = compiled(tmp_path)
    warned = "\n".join(plan.summary.warnings)
    assert "decode batches up to 64; 128 responses of an engine decode at once: they are taken as 64" in warned
    plan = compiled(tmp_path, "workload.prompt_tokens=3000", "sharing={kind: mps}")
    assert "the calibration's co-run surface is not used" in "\n".join(plan.summary.warnings)
    assert not plan.summary.policy.rows


# ---- the checker


def test_a_better_table_is_seen(tmp_path: Path) -> None:
    """A plan that holds to another table, with all seconds right, is refused by the row that could be better."""
    path = tmp_path / "job.yaml"
    path.write_text(SOLVED)
    mps = compiled(tmp_path, "sharing={kind: mps}")
    job = {**mps.job, "sharing": {"kind": "solved", "share": None}}
    policy = {"kind": "solved", "mps_s": round(p1_s(mps), 6)}
    both = round(p1_s(mps), 6)
    told = SolverResult(name="share-policy", status="optimal", objective="P1 seconds", value=both, bound=both)
    other = summarise(with_policy(mps, **policy), solvers=(*mps.summary.solvers, told))
    found = check_plan(other.model_copy(update={"job": job}))
    assert [v.kind for v in found] == ["sharing"]
    assert "another table, with" in found[0].what


def test_a_row_that_waits_begins_where_the_one_before_ends(tmp_path: Path) -> None:
    plan = compiled(tmp_path)
    first = plan.summary.policy.rows[0]
    wrong = with_row(plan, 0, first.model_copy(update={"live_at_most": first.live_at_most + 1}))
    assert "its first row is for at most 129 responses, 128 of an engine decode at once" in str(check_plan(wrong)[0])


def test_rows_that_begin_elsewhere_are_seen(tmp_path: Path) -> None:
    plan = compiled(tmp_path)
    row = plan.summary.policy.rows[9]
    assert (row.live_at_most, row.from_tokens) == (45, 408)
    late, other = row.model_copy(update={"from_tokens": 409}), row.model_copy(update={"live_at_most": 44})
    assert [v.what for v in check_plan(with_row(plan, 9, late))] == [
        "at most 45: it holds from token 409; by decode's predicted end and the budget of 1185 tokens it must from 408"
    ]
    found = [v.what for v in check_plan(with_row(plan, 9, other))]
    assert found[0].startswith("it has a row for at most 44; parts of decode begin with 128, 127, 124, ")
    assert found[1] == "it has no row for at most 45, with which a part of decode begins"


@pytest.mark.parametrize("tail", ["{kind: partial, share: 0.5}", "{kind: oversample, factor: 1.3}"])
def test_rows_of_a_cut_decode_begin_as_the_checker_has_it(tail: str, tmp_path: Path) -> None:
    """Two programs for one distribution: neither knows of the other."""
    plan = compiled(tmp_path, f"workload.rollout={tail}", "sharing={kind: mps}")
    assert len(plan.summary.policy.rows) > 20
    assert not check_plan(plan)


# ---- jobs that cannot be solved

REFUSED = {
    "another GPU": (["cluster.gpu=H800"], "the calibration was measured on H200 (NVIDIA H200), the job's GPU is H800"),
    "another model": (
        ["model=Qwen2.5-VL-7B"],
        "the calibration was measured for layers 36, hidden 2048, ffn 11008, heads 16, kv_heads 2, vocab 151936; the "
        "job has layers 28, hidden 3584, ffn 18944, heads 28, kv_heads 4, vocab 152064",
    ),
    "other degrees": (
        ["cluster.gpus_per_node=2", "roles.actor.train.tensor_parallel=2"],
        "the calibration was measured for train_tp 1; the job has train_tp 2",
    ),
    "no file": (["cluster.calibration=none.json"], "cannot read the calibration"),
    "no calibration": (["cluster.calibration=null"], "the job has no calibration"),
    "other prompts": (
        ["workload.prompt_tokens=1500"],
        "prefix chunks of 1024, 2048, 6000 tokens; prefixes run whole, and a prompt has 1500 tokens",
    ),
    "streamed": (["schedule=streamed"], "sharing solved knows of prefixes beside it alone"),
    "a share": (["sharing.share=0.5"], "share 0.5 has no effect with kind solved"),
    "turns": (
        ["workload.turns={count: 2, observation_tokens: 16}"],
        "for one decode a step, and the job has 2 turns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_job_that_nothing_was_measured_for_is_refused(name: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[name]
    with pytest.raises(JobError) as caught:
        job_of(tmp_path, *STEP, *overrides)
    assert message in str(caught.value)


ELSEWHERE = {
    "device": ("NVIDIA H100 80GB HBM3", "the calibration says H200 and was measured on NVIDIA H100 80GB HBM3"),
    "sms": (60, "the calibration was measured on NVIDIA H200 with 60 SMs, the table of GPUs has H200 with 132"),
}


def measured_elsewhere(name: str) -> dict[str, Any]:
    """The file of another device, or of a slice of the GPU: 60 SMs in place of 132, and no larger partition."""
    data = json.loads(CALIBRATED.read_text())
    if name == "device":
        return {**data, "device": ELSEWHERE[name][0]}
    surface = data["surface"]
    rows = [{**row, "sms": 60} for row in surface["rows"] if row["sms"] == 132]
    return {**data, "surface": {**surface, "all_sms": 60, "rows": rows}}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_file_of_another_gpu_is_refused(name: str, tmp_path: Path) -> None:
    """By a job that names it, and by whoever reads a plan that holds it."""
    wrong = measured_elsewhere(name)
    (tmp_path / "other.json").write_text(json.dumps(wrong))
    with pytest.raises(JobError) as caught:
        job_of(tmp_path, *STEP, "cluster.calibration=other.json")
    (problem,) = caught.value.problems
    assert problem.what == ELSEWHERE[name][1]
    assert problem.hint.startswith("rollplex calibrate JOB --out FILE, on a")
    plan = compiled(tmp_path)
    job = {**plan.job, "cluster": {**plan.job["cluster"], "calibration": wrong}}
    assert ELSEWHERE[name][1] in str([v.what for v in check_plan(plan.model_copy(update={"job": job}))])


def test_an_unreadable_file_is_told_once(tmp_path: Path) -> None:
    """Not also as a job without a calibration."""
    (tmp_path / "text.json").write_text("{")
    (tmp_path / "list.json").write_text("[]")
    data = json.loads(CALIBRATED.read_text())
    (tmp_path / "later.json").write_text(json.dumps({**data, "schema_version": 2}))
    data["surface"]["rows"] = data["surface"]["rows"][1:]
    data["hbm_gb_s"] = -1
    (tmp_path / "holes.json").write_text(json.dumps(data))
    for name, message in (
        ("text", "is not JSON"),
        ("list", "no calibration"),
        ("later", "schema_version 2, this Rollplex reads 1"),
        ("holes", "hbm_gb_s: Input should be greater than 0"),
    ):
        with pytest.raises(JobError) as caught:
            job_of(tmp_path, *STEP, f"cluster.calibration={name}.json")
        problems = caught.value.problems
        assert message in str(caught.value)
        assert all(p.where == f"--set cluster.calibration={name}.json" for p in problems)
        assert all("rollplex calibrate JOB" in p.hint for p in problems)
    assert "chunks of 1024 tokens on 64 SMs were measured at batches [16, 64], decode at [4, 16, 64]" in str(
        caught.value
    )
