"""Host memory of a node: pools, processes and the batch by hand; which node is the fullest; what is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_texts import write

from rollplex import api
from rollplex.ir.checker import check_plan
from rollplex.ir.errors import RunError
from rollplex.ir.job import load_job
from rollplex.ir.plan import Plan
from rollplex.passes.node_memory import Node, batch_bytes_of, nodes, process_bytes
from rollplex.passes.payload import batch_bytes
from rollplex.runtime.preflight import check_plan as preflight
from rollplex.show.page import plan_page

ROOT, GIB = Path(__file__).resolve().parent.parent, 2**30
GRPO, X8 = str(ROOT / "examples/grpo.py"), ROOT / "examples/jobs/qwen2_5_vl_32b_h800x8.yaml"
SMALL = """\
model: Qwen2.5-7B
cluster: {gpu: H800, gpus_per_node: 8, nodes: 1, host_memory_gb: 100}
roles:
  actor:
    train:   {engine: megatron, tensor_parallel: 4}
    rollout: {engine: vllm, tensor_parallel: 2, kv_cache_gib: 20}
  reference:
    score:   {engine: megatron, tensor_parallel: 4}
workload: {prompts: 64, group: 8, prompt_tokens: 4096, response_tokens: 1024}
"""


def compiled(directory: Path, *overrides: str, text: str = SMALL) -> Plan:
    return api.compile_files(GRPO, write(directory, text), list(overrides)).plan


def test_the_parts_by_hand() -> None:
    """Two engines a GPU and the controller; TP 8 of one replica has the batch at every rank."""
    plan = api.compile_files(GRPO, X8).plan
    node, top = plan.summary.node, max(p.offset + p.bytes for p in plan.summary.host_pool.offsets)
    assert node.pinned_bytes == 8 * top
    assert node.process_bytes == 17 * 1300 * 2**20
    assert node.batch_bytes == 9 * plan.summary.batch_bytes
    assert node.capacity_bytes == 1400 * 10**9
    assert (node.gpus, node.controller) == ({"gpus": 8}, True)


def test_replicas_share_the_batch(tmp_path: Path) -> None:
    """TP 4 on 8 GPUs: two replicas, a rank has half the batch."""
    job = load_job(write(tmp_path, SMALL))
    (node,) = nodes(job)
    assert batch_bytes_of(job, node) == 8 * batch_bytes(job) // 2 + batch_bytes(job)


@pytest.mark.parametrize(
    ("rollout", "kinds"),
    [
        (8, [({"training": 8}, True), ({"training": 8}, False), ({"rollout": 8}, False)]),
        (12, [({"training": 8}, True), ({"training": 4, "rollout": 4}, False), ({"rollout": 8}, False)]),
        (20, [({"training": 4, "rollout": 4}, True), ({"rollout": 8}, False)]),
    ],
)
def test_kinds_of_nodes(rollout: int, kinds: list[tuple[dict[str, int], bool]], tmp_path: Path) -> None:
    """The training pool has the first GPUs, a rollout rank no batch, each GPU of a pool one process."""
    pools = (f"cluster.rollout_gpus={rollout}", "schedule=disaggregated", "cluster.nodes=3", "workload.prompts=240")
    job = load_job(write(tmp_path, SMALL), [*pools, "roles.actor.rollout.kv_cache_gib=200"])
    assert list(nodes(job)) == [Node(*kind) for kind in kinds]
    last = Node({"rollout": 8}, controller=False)
    assert batch_bytes_of(job, last) == 0
    assert process_bytes(job, last) == 8 * 1300 * 2**20


def test_the_job_may_state_what_a_process_keeps(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "cluster.host_memory_gb=200", "cluster.process_host_gib=3.6")
    assert plan.summary.node.process_bytes == 17 * round(3.6 * GIB)


def test_on_the_host_backend_the_pool_alone_is_counted() -> None:
    """`host_memory_gb` of a cpu is a budget of the pool."""
    plan = api.compile_files(GRPO, ROOT / "examples/jobs/shapes_host.yaml").plan
    assert plan.summary.node.process_bytes == plan.summary.node.batch_bytes == 0


# ---- a node that is full


def test_a_full_node_is_explained(tmp_path: Path) -> None:
    """Every pinned pool is within its share, the node is not: window, objects over all GPUs, shortfall, a way out."""
    plan = compiled(tmp_path, "cluster.host_memory_gb=50")
    node, found = plan.summary.node, plan.infeasible
    assert plan.summary.peak_host_bytes <= plan.summary.host_capacity_bytes
    assert found is not None
    assert found.resource == "node"
    assert found.shortfall_bytes == node.total_bytes - 50 * 10**9
    listed = {o.name: o.bytes for o in found.objects}
    assert listed["node.processes"] == node.process_bytes
    assert listed["node.batch"] == node.batch_bytes
    assert listed["reference.weights"] == 8 * plan.object("reference.weights").bytes
    assert sum(listed.values()) == node.total_bytes
    assert check_plan(plan) == ()


def test_the_page_says_what_fills_it(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "cluster.host_memory_gb=50")
    text = "\n".join(line.plain for line in plan_page(plan, "job.yaml"))
    assert "are live, the host memory of a node is 46.6 GiB" in text
    assert "engine processes" in text
    assert "batch of a step" in text
    assert "cluster.host_memory_gb=56.25" in text


def test_a_remedy_is_compiled_and_checked(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "cluster.host_memory_gb=50")
    assert plan.infeasible is not None
    for remedy in plan.infeasible.remedies:
        assert remedy.verified
        changed = compiled(tmp_path, "cluster.host_memory_gb=50", *remedy.change.split())
        assert changed.feasible, remedy.change


def test_a_run_is_refused_by_its_resource(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"does not fit: the host memory of a node is .* short in window P1"):
        preflight(compiled(tmp_path, "cluster.host_memory_gb=50"))


def test_a_verdict_that_forgets_the_node_is_refused(tmp_path: Path) -> None:
    plan = compiled(tmp_path, "cluster.host_memory_gb=50")
    forgets = plan.model_copy(update={"feasible": True, "infeasible": None})
    assert {v.kind for v in check_plan(forgets)} == {"feasible"}
