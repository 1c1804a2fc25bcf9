"""What ranks exchanged while they were measured: who takes a file of it, which predictions it changes, and by how much.

tests/data/h200_3b.json, taken for a file of two GPUs: a trainer of TP 2, whose sums take 20 us and 1 s for 200 GB
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mutants.plans import CALIBRATED, SOLVED
from mutants.sharing import with_policy

from rollplex import api
from rollplex.ir.calibration import Exchange, Summed, parse_calibration, read_calibration
from rollplex.ir.check.facts import Facts
from rollplex.ir.check.sharing import exchanged_s
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import JobError
from rollplex.ir.job import Job, load_job
from rollplex.ir.plan import Plan
from rollplex.ir.work import role_work
from rollplex.passes.costs import Costs
from rollplex.passes.work import decoded_bytes

TWO = ("cluster.gpus_per_node=2", "roles.actor.train.tensor_parallel=2", "roles.reference.score.tensor_parallel=2")
KEYS = (*TWO, "cluster.calibration=two.json")
MATCHED = "roles.actor.rollout.tensor_parallel=2"
SIZES = (1 << 20, 16 << 20, 64 << 20)


def summed_s(nbytes: float) -> float:
    return 20e-6 + nbytes / 200e9


def file_of(exchange: dict[str, Any] | None, **shape: int) -> dict[str, Any]:
    data = json.loads(CALIBRATED.read_text())
    return {**data, "shape": {**data["shape"], **shape}, "exchange": exchange}


def exchange(*sizes: int, stretches: bool = True) -> dict[str, Any]:
    return {"stretches": stretches, "sums": [{"nbytes": n, "seconds": summed_s(n)} for n in sizes]}


def job_of(folder: Path, data: dict[str, Any], *overrides: str) -> Job:
    (folder / "two.json").write_text(json.dumps(data))
    (folder / "job.yaml").write_text(SOLVED)
    return load_job(folder / "job.yaml", [*KEYS, *overrides])


# ---- the figure


def test_a_sum_is_linear_between_what_was_measured() -> None:
    """Below the smallest it waits as long, above the largest it goes on at that rate."""
    found = Exchange(stretches=False, sums=tuple(Summed(nbytes=n, seconds=s) for n, s in ((300, 4.0), (100, 1.0))))
    assert [found.sum_s(n) for n in (0, 100, 150, 300, 600)] == [1.0, 1.0, 1.75, 4.0, 8.0]


def test_predictions_take_the_measured_sums(tmp_path: Path) -> None:
    """A prefix of 6000 tokens has two in each of 36 layers; twice the seconds of a sum are 36 x 2 of them more."""
    data = file_of(exchange(*SIZES), train_tp=2)
    slow = exchange(*SIZES)
    slow["sums"] = [{**row, "seconds": 2 * row["seconds"]} for row in slow["sums"]]
    both = [Costs(job_of(tmp_path, d)) for d in (data, {**data, "exchange": slow})]
    first, second = (costs.prefix_s(role_work(costs.job, "reference"), 1) for costs in both)
    one = summed_s(6000 * 2048 * 2)
    assert second - first == pytest.approx(36 * 2 * one, rel=1e-6)
    assert both[0].all_reduce_s(6000 * 2048 * 2, 2) == pytest.approx(one)
    plain = Costs(load_job(tmp_path / "job.yaml", [*TWO, "cluster.calibration=null", "sharing={kind: mps}"]))
    for tp in (4, 8):  # of another role's group nothing was measured
        assert both[0].all_reduce_s(1 << 20, tp) == plain.all_reduce_s(1 << 20, tp)


def test_a_measured_step_has_its_ranks_sums_already(tmp_path: Path) -> None:
    """At rollout TP 2 a step is the file's, and the sums of the trainer's ranks are not added to it."""
    data = file_of(exchange(*SIZES), train_tp=2, rollout_tp=2)
    costs = Costs(job_of(tmp_path, data, MATCHED))
    data["exchange"]["sums"] = [{**row, "seconds": 9.0} for row in data["exchange"]["sums"]]
    slow = Costs(job_of(tmp_path, data, MATCHED))
    prompts = costs.job.sampled_per_engine[-1]
    first, second = (list(c.decode_parts(decoded_bytes(c.job), 2, prompts)) for c in (costs, slow))
    assert first == second
    assert costs.measured
    steps = [costs.measured.step_s(live, 6000) for _, live in first]
    assert 0.9 < sum(s for s, _ in first) / (sum(steps) / len(steps) * 1185) < 1.2


# ---- in a plan


def compiled(folder: Path, data: dict[str, Any]) -> Plan:
    job_of(folder, data)
    return api.compile_files("examples/grpo.py", folder / "job.yaml", [*KEYS, "workload.prompts=16"]).plan


def with_exchange(plan: Plan, exchange: dict[str, Any]) -> Plan:
    """The plan of a job with other sums, its table still said to rest on the job's file."""
    cluster = plan.job["cluster"]
    other = {**cluster["calibration"], "exchange": exchange}
    found = plan.model_copy(update={"job": {**plan.job, "cluster": {**cluster, "calibration": other}}})
    return with_policy(found, surface=parse_calibration(other, "two.json").digest)


def test_the_checker_sums_up_what_ranks_exchange(tmp_path: Path) -> None:
    """16 prompts, two roles, two sums in each of 36 layers: prefixes take no less, and a file of others is seen."""
    plan = compiled(tmp_path, file_of(exchange(*SIZES), train_tp=2))
    assert not check_plan(plan)
    least, prefix_s = 16 * 2 * 36 * 2 * summed_s(6000 * 2048 * 2), plan.summary.times.prefix_s
    job = load_job(tmp_path / "job.yaml", [*KEYS, "workload.prompts=16"])
    assert exchanged_s(Facts(plan), job) == pytest.approx(least)
    assert least < prefix_s
    slow = exchange(*SIZES)
    times = prefix_s / least
    for by, found in ((0.999 * times, []), (1.001 * times, ["sharing"])):
        slow["sums"] = [{**row, "seconds": by * row["seconds"]} for row in exchange(*SIZES)["sums"]]
        assert [v.kind for v in check_plan(with_exchange(plan, slow))] == found
    (seen,) = check_plan(with_exchange(plan, slow))
    assert seen.what == (
        f"its prefixes take {prefix_s:.6f} s, what their ranks exchange was measured to take {1.001 * prefix_s:.6f} s"
    )
    unnamed = with_policy(with_exchange(plan, slow), surface=plan.summary.policy.surface)
    assert any("the job's calibration is another" in v.what for v in check_plan(unnamed))


# ---- who takes the file


def test_a_file_of_one_gpu_is_named_as_ever() -> None:
    """Plans that rest on one hold its digest."""
    assert read_calibration(CALIBRATED).digest == "866de818b959aa86"
    first, second = (parse_calibration(file_of(exchange(n), train_tp=2), "two.json").digest for n in SIZES[:2])
    assert len({first, second, "866de818b959aa86"}) == 3


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "measured one by one": (
        file_of(None, train_tp=2),
        (),
        "the calibration was measured at TP 1, each rank by itself on one GPU; the job trains at TP 2 and rolls out at "
        "TP 1\n    try: rollplex calibrate JOB --out FILE, on a machine with 2 such GPUs, or leave it out",
    ),
    "engines one by one": (
        file_of(None, train_tp=2, rollout_tp=2),
        (MATCHED,),
        "measured at TP 1, each rank by itself on one GPU; the job trains at TP 2 and rolls out at TP 2",
    ),
    "other degrees": (
        file_of(exchange(*SIZES), train_tp=2),
        (MATCHED,),
        "the calibration was measured for rollout_tp 1; the job has rollout_tp 2",
    ),
    "of all-reduces": (
        file_of(exchange(*SIZES, stretches=False), train_tp=2),
        (),
        "the calibration was measured without sequence_parallel; the job's trainer is with sequence_parallel",
    ),
    "of stretches": (
        file_of(exchange(*SIZES), train_tp=2),
        ("roles.actor.train.sequence_parallel=false",),
        "the calibration was measured with sequence_parallel; the job's trainer is without sequence_parallel",
    ),
    "one rank": (file_of(exchange(*SIZES)), (), "Value error, exchange: one rank exchanges nothing"),
    "no sums": (file_of(exchange(), train_tp=2), (), "Value error, exchange.sums: 0 of a trainer of TP 2"),
    "twice": (file_of(exchange(5, 5), train_tp=2), (), "exchange: Value error, a size stands there twice"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_of_other_ranks_is_refused(name: str, tmp_path: Path) -> None:
    data, overrides, message = REFUSED[name]
    with pytest.raises(JobError) as caught:
        job_of(tmp_path, data, *overrides)
    assert message in str(caught.value)
