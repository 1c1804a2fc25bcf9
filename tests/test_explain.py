"""`rollplex explain`: the facts behind a plan file come back, every place has a price or a reason, the peak adds up."""

from __future__ import annotations

from pathlib import Path

import pageplan
import pytest

from rollplex import api
from rollplex.ir.errors import PlanError
from rollplex.ir.job import load_job
from rollplex.ir.loading import load_algorithm
from rollplex.ir.plan import Plan, read_plan
from rollplex.passes.pipeline import compile_plan, default_pipeline, run_passes, start
from rollplex.passes.rebuild import as_planned, rebuild
from rollplex.passes.residency_data import gather
from rollplex.passes.schedule import Schedule
from rollplex.passes.state import Lifetimes
from rollplex.show.explained import explained_lines, next_peak, peak_lines

GRPO = load_algorithm("examples/grpo.py")
X8, SHAPES = "examples/jobs/qwen2_5_vl_32b_h800x8.yaml", "examples/jobs/shapes_host.yaml"


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """The 32B plan, through its file."""
    path = tmp_path_factory.mktemp("explain") / "plan.json"
    path.write_text(compile_plan(GRPO, load_job(X8)).to_json(), "utf-8")
    return read_plan(path)


@pytest.mark.parametrize(
    ("job", "overrides"), [(X8, ()), (X8, ("schedule=serial",)), (X8, ("schedule=naive",)), (SHAPES, ())]
)
def test_a_plan_file_gives_its_facts_back(job: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """Schedule and state contract made from the file alone are those of the compilation."""
    passes = default_pipeline()
    module = run_passes(start(GRPO, load_job(job, overrides)), passes)
    path = tmp_path / "plan.json"
    path.write_text(compile_plan(GRPO, load_job(job, overrides)).to_json(), "utf-8")
    again = rebuild(read_plan(path))
    assert again[Schedule].windows == module[Schedule].windows
    assert again[Lifetimes] == module[Lifetimes]
    sized = as_planned(read_plan(path), again)[Lifetimes]
    assert {o.name: o.nbytes for o in sized.objects} == {o.name: o.bytes for o in read_plan(path).summary.objects}


def test_every_other_place_has_a_price_or_a_reason(plan: Plan) -> None:
    """For each window in which an object exists, the two places where it is not: priced where legal, else refused."""
    items = {i.name: i for i in gather(rebuild(plan)).items}
    for name in ("reference.weights", "actor.boundary", "actor.moments", "actor.prefix_saved", "train.activations"):
        found = api.explain(plan, name)
        assert len(found.moves) == 2 * len(items[name].places)
        for m in found.moves:
            assert bool(m.refused) == (m.place not in items[name].places[m.window])
        assert [s.place for s in found.stays] == list(plan.object(name).residency.values())


def test_prices_are_of_the_plan(plan: Plan) -> None:
    """No other place is better: exposed time grows, or the peak close to capacity, the bytes moved, the peak."""
    peak, roomy = plan.summary.peak_hbm_bytes, plan.summary.capacity_bytes * 9 // 10
    near = lambda nbytes: max(0, nbytes - roomy)  # noqa: E731
    for name in ("reference.weights", "actor.prefix_saved", "actor.moments"):
        for m in (m for m in api.explain(plan, name).moves if not m.refused):
            closer = near(peak + m.peak_bytes) - near(peak)
            assert (m.over_bytes, round(m.exposed_s, 6), closer, m.moved_bytes, m.peak_bytes) >= (0,) * 5, m
    dropped = next(m for m in api.explain(plan, "actor.prefix_saved").moves if m.place == "dropped")
    assert dropped.exposed_s == pytest.approx(plan.summary.times.prefix_s / 2, rel=0.05)


def test_sizes_are_told_by_the_keys_that_move_them(plan: Plan) -> None:
    """KV of a boundary: proportional to prompts and prompt tokens, not to the response budget."""
    effects = {e.key: e for e in api.explain(plan, "actor.boundary").effects}
    assert {"workload.prompts", "workload.prompt_tokens"} <= set(effects)
    assert "workload.response_tokens" not in effects
    halved = effects["workload.prompts"]
    assert halved.nbytes / plan.object("actor.boundary").bytes == pytest.approx(int(halved.new) / int(halved.old))
    assert [e.key for e in api.explain(plan, "rollout.kv").effects] == ["roles.actor.rollout.kv_cache_gib"]


def test_a_size_is_told_as_a_formula(plan: Plan) -> None:
    """In the job's own numbers, with its named parts below; where no formula fits the bytes, that is said."""
    lines = [t.plain for t in explained_lines(api.explain(plan, "actor.prefix_saved"), plan)]
    at = next(i for i, text in enumerate(lines) if text.startswith("formula"))
    # 64 checkpointed layer inputs of 5120 x 2 / 8 bytes; the last layer's norm, its queries and angles
    token = 64 * 1280 + 2 * 1280 + 8 + (40 * 128 // 8 + 4 * 128) * 2 + 4 * 128
    assert lines[at] == f"formula    32 prompts x a prompt = {32 * 8192 * token / 2**30:.2f} GiB"
    said = f"a prompt = 8192 tokens x (64 layers x layer input + last layer) = {8192 * token:,}"
    assert lines[at + 1].strip() == said
    host = compile_plan(GRPO, load_job(SHAPES))
    lines = [t.plain for t in explained_lines(api.explain(host, "train.activations"), host)]
    assert any(text.startswith("formula    none in words comes to these bytes") for text in lines)


def test_unknown_objects_name_the_nearest(plan: Plan) -> None:
    """A slip of the pen is answered with what was meant."""
    with pytest.raises(PlanError, match=r"no object `actor\.boundry`\n    try: actor\.boundary"):
        api.explain(plan, "actor.boundry")
    assert api.explain(plan, "rollout KV cache").object.name == "rollout.kv"


def test_peaks_without_each_object() -> None:
    """By hand: 7 GiB in P1 prefix-ref, 5 in decode, 8 in train; without the activations P1 is the peak."""
    plan = pageplan.plan()
    assert next_peak(plan, "train.activations") == (plan.summary.windows[0].hbm_bytes, "P1 prefix-ref")
    assert next_peak(plan, "actor.moments") == (plan.summary.peak_hbm_bytes, plan.summary.peak_window)
    rows = [t.plain.split() for t in peak_lines(plan)]
    assert [r[0] for r in rows[2:]] == ["actor.snapshot", "train.activations", "actor.boundary"]


def test_lines_stay_within_the_page(plan: Plan) -> None:
    """Whatever is explained."""
    for o in plan.summary.objects[:6]:
        assert max(len(t.plain) for t in explained_lines(api.explain(plan, o.name), plan)) <= 100
