"""Every model call is cut at the first response position; what depends on the response is found through any op."""

from __future__ import annotations

import tempfile
from pathlib import Path

import golden
import pytest
from algorithms import START, grpo, job, made, split
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Node

from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.errors import GraphError, PassError
from rollplex.ir.module import Module
from rollplex.passes.infer_types import Types
from rollplex.passes.prefix_split import PrefixSplit, Split, SplitCall
from rollplex.passes.share_prefix import SharedPrefixes, SharePrefix

END = "actor.update(rx.masked_mean(logp, rollout.mask))\n"


def call_of(folder: Path, body: str, node: str) -> SplitCall:
    module = split(made(folder, START + body + END))
    g.verify(module.graph)
    return next(c for c in module[Split].calls if c.node == node)


def test_grpo():
    """
    prompts --> kv_ref --+
                         +--> ref_logp          kv_ref and kv_act do not wait for rollout
    rollout -------------+
    """
    module = split(grpo())
    g.verify(module.graph)
    late = g.response_dependent(module.graph)
    for boundary, call in (("kv_ref", "ref_logp"), ("kv_act", "logp")):
        prefix, suffix = g.node_named(module.graph, boundary), g.node_named(module.graph, call)
        assert g.is_op(prefix, ops.prefix)
        assert g.is_op(suffix, ops.suffix)
        assert prefix in suffix.all_input_nodes
        assert prefix not in late
        assert suffix in late
        assert g.loc(prefix) == g.loc(suffix)
    golden.check("grpo_calls.txt", f"{module[Split]}\n")


def test_the_trained_roles_boundary_is_attached_and_the_frozen_ones_is_not():
    types = split(grpo())[Types].types
    assert str(types["kv_act"]) == "Boundary [prompt] attached"
    assert str(types["kv_ref"]) == "Boundary [prompt]"


def test_the_rest_of_the_graph_is_untouched():
    before, after = grpo().trace(), split(grpo()).graph
    assert {n.name for n in before.nodes} <= {n.name for n in after.nodes}
    assert not g.find(after, ops.logprobs)
    assert g.attached(after) >= {n for n in after.nodes if n.name in {m.name for m in g.attached(before)}}


def test_prompts_that_depend_on_the_response_keep_the_call_whole(tmp_path):
    body = "late = rx.host(reward, returns='sample_prompts')(prompts, rollout)\nx = reference.logprobs(late, rollout)\n"
    call = call_of(tmp_path, body, "x")
    assert (call.prefix, call.early) == (None, False)
    assert call.why == "its prompts late depend on the response"


def test_a_dataset_answer_is_scored_whole_and_may_run_early(tmp_path):
    """Nothing of the call waits for the rollout: it may run in P1 as it is."""
    body = "answer = rx.host(reward, returns='rollout')(prompts)\nx = reference.logprobs(prompts, answer)\n"
    call = call_of(tmp_path, body, "x")
    assert (call.prefix, call.early) == (None, True)
    assert "all of it may run in P1" in call.why


def test_prompts_made_by_a_host_function_split_too(tmp_path):
    body = "hinted = rx.host(reward, returns='prompts')(prompts)\nx = reference.logprobs(hinted, rollout)\n"
    call = call_of(tmp_path, body, "x")
    assert call.prefix == "kv_ref"
    assert call.why == "hinted is known before decode"


MATHS = [
    "{} * 0",
    "torch.sigmoid({})",
    "{}.detach()",
    "{}.sum()",
    "({} > 0).float()",
    "torch.zeros_like({})",
    "{}.cumsum(0)",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(MATHS), max_size=5), st.booleans(), st.booleans())
def test_dependence_goes_through_any_chain_of_maths_and_hosts(chain, from_response, through_host):
    """
    score (or prompts.lengths) --> torch ops, even `* 0` --> [host] --> host makes prompts --> logprobs
    """
    lines = [f"x = {'score' if from_response else 'prompts.lengths'} * 1.0"]
    lines += [f"x = {form.format('x')}" for form in chain]
    lines += ["x = rx.host(reward)(prompts, x)"] * through_host
    lines += ["made_prompts = rx.host(reward, returns='prompts')(prompts, x)"]
    lines += ["y = reference.logprobs(made_prompts, rollout)"]
    with tempfile.TemporaryDirectory() as folder:
        call = call_of(Path(folder), "\n".join(lines) + "\n", "y")
    assert (call.prefix is None) == from_response


def test_two_calls_of_a_role_on_the_same_prompts_share_a_prefix(tmp_path):
    body = "other = actor.generate(prompts, n=n)\n"
    body += "x = reference.logprobs(prompts, rollout)\ny = reference.logprobs(prompts, other)\n"
    module = SharePrefix().run(split(made(tmp_path, START + body + END)))
    boundary = g.node_named(module.graph, "kv_ref")
    assert {n.name for n in boundary.users} == {"x", "y"}
    assert len(g.find(module.graph, ops.prefix)) == 2, "one of the actor, one of the reference"
    assert module[SharedPrefixes].of("kv_ref").readers == 2 * 8


def test_a_prefix_the_user_wrote_is_kept_and_shared(tmp_path):
    body = "kv = reference.prefix(prompts)\nx = reference.logprobs(kv, rollout)\n"
    body += "y = reference.logprobs(prompts, rollout)\n"
    module = split(made(tmp_path, START + body + END))
    assert {n.name for n in g.node_named(module.graph, "kv").users} == {"x", "y"}
    assert next(c for c in module[Split].calls if c.node == "x").why == "written split"
    late = (
        "y = reference.logprobs(prompts, rollout)\nkv = reference.prefix(prompts)\nx = reference.suffix(kv, rollout)\n"
    )
    graph = split(made(tmp_path, START + late + END)).graph
    assert {n.name for n in g.node_named(graph, "kv_ref").users} == {"x", "y"}


def test_one_prefix_a_prompt_read_by_every_response():
    module = SharePrefix().run(split(grpo()))
    rows = module[SharedPrefixes].boundaries
    assert [(r.boundary, r.role, r.prefixes, r.readers) for r in rows] == [
        ("kv_ref", "reference", 32, 8),
        ("kv_act", "actor", 32, 8),
    ]
    assert g.node_named(module.graph, "kv_ref").meta["readers"] == 8
    golden.check("grpo_shared.txt", f"{module[SharedPrefixes]}\n")


def test_prompts_of_single_samples_are_not_shared(tmp_path):
    """Each response has a prompt of its own: 32 x 8 prefixes, each read once."""
    body = "own = rx.host(reward, returns='sample_prompts')(prompts)\nx = reference.logprobs(own, rollout)\n"
    row = SharePrefix().run(split(made(tmp_path, START + body + END)))[SharedPrefixes].of("kv_ref")
    assert (row.prefixes, row.readers) == (32 * 8, 1)
    assert row.why == "not shared: own differ within a group"


def test_passes_change_nothing_in_place():
    module = split(grpo())
    before = str(module.graph)
    shared = SharePrefix().run(module)
    assert str(module.graph) == before
    assert all("readers" not in n.meta for n in module.graph.nodes)
    assert any("readers" in n.meta for n in shared.graph.nodes)


def test_types_come_first():
    module = Module(grpo().trace(), job(), grpo())
    with pytest.raises(PassError, match=r"no Types yet\n.*infer-types"):
        PrefixSplit().run(module)


# ---------------------------------------------------------------------------------------------- what verify refuses


def spoiled(change) -> str:
    graph = g.copy_graph(split(grpo()).graph)
    change(graph)
    with pytest.raises(GraphError) as error:
        g.verify(graph)
    return str(error.value)


def test_verify_refuses_a_prefix_that_waits_for_the_response():
    def late(graph) -> None:
        prompts = g.node_named(graph, "prompts")
        prefix = g.node_named(graph, "kv_ref")
        with graph.inserting_before(prefix):
            host: Node = graph.call_function(
                ops.host, ("reward", g.node_named(graph, "rollout")), {"returns": "prompts"}
            )
        host.meta = dict(prefix.meta)
        prefix.replace_input_with(prompts, host)

    assert "grpo.py:15: %kv_ref is a prefix of a value that depends on the response" in spoiled(late)


def test_verify_refuses_a_node_without_a_line_and_an_op_of_no_table():
    def foreign(graph) -> None:
        node = g.node_named(graph, "ratio")
        with graph.inserting_after(node):
            graph.call_function(print, (node,))

    text = spoiled(foreign)
    assert "has no line of the user's file" in text
    assert "print is not an op of an algorithm" in text
