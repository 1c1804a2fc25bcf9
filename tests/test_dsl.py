"""What `@rx.algorithm` makes of a function: a graph with the user's names and lines, roles by annotation or by use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from algorithms import FIRST_LINE, START, grpo, made

import rollplex as rx
from rollplex.ir import graph as g
from rollplex.ir import ops
from rollplex.ir.loading import load_algorithm


def names(nodes) -> set[str]:
    return {n.name for n in nodes}


def test_every_node_of_grpo_has_the_users_name_and_line():
    """
    line 14  rollout
    line 19  rollout.logprobs, logp - .., ratio = torch.exp(..)
    """
    graph = grpo().trace()
    lines = {n.name: g.loc(n).line for n in graph.nodes if n.op != "output"}
    text = (Path(grpo().file)).read_text().splitlines()
    for name in ("rollout", "ref_logp", "logp", "score", "advantage", "ratio", "policy", "delta", "loss"):
        assert text[lines[name] - 1].lstrip().startswith(f"{name} = "), name
    assert lines["sub"] == lines["ratio"] == lines["rollout_logprobs"]
    assert {g.loc(n).file for n in graph.nodes if n.op != "output"} == {"grpo.py"}


def test_operators_of_one_statement_over_several_lines_keep_their_own_lines(tmp_path):
    body = START + "loss = rx.masked_mean(\n    -logp\n    * score,\n    rollout.mask,\n)\nactor.update(loss)\n"
    graph = made(tmp_path, body).trace()
    assert g.loc(g.node_named(graph, "neg")).line == FIRST_LINE + 4
    assert g.loc(g.node_named(graph, "rollout_mask")).line == FIRST_LINE + 6


def test_a_helper_in_the_same_file_gives_its_own_line_and_the_caller_gives_the_name(tmp_path):
    path = tmp_path / "helped.py"
    path.write_text(
        "import rollplex as rx\n"
        "def k3(p, q):\n"
        "    gap = q - p\n"
        "    return gap.exp() - gap - 1\n"
        "@rx.algorithm\n"
        "def made(prompts, *, actor, reference):\n"
        "    rollout = actor.generate(prompts, n=2)\n"
        "    kl = k3(actor.logprobs(prompts, rollout), reference.logprobs(prompts, rollout))\n"
        "    actor.update(rx.masked_mean(kl, rollout.mask))\n"
    )
    graph = load_algorithm(path).trace()
    assert g.loc(g.node_named(graph, "gap")).line == 3
    assert g.loc(g.node_named(graph, "kl")).line == 4
    assert g.is_op(g.node_named(graph, "logprobs"), ops.logprobs), "an argument of a helper does not name its value"


def test_a_helper_in_another_file_is_reported_at_the_line_that_calls_it(tmp_path):
    (tmp_path / "maths_of_a_user.py").write_text("def double(x):\n    return x + x\n")
    body = START + "from maths_of_a_user import double\nactor.update(rx.masked_mean(double(logp), rollout.mask))\n"
    sys.path.insert(0, str(tmp_path))
    try:
        graph = made(tmp_path, body).trace()
    finally:
        sys.path.remove(str(tmp_path))
    assert str(g.loc(g.node_named(graph, "add"))) == f"made.py:{FIRST_LINE + 4}"


def test_a_file_that_changes_within_a_second_is_read_again(tmp_path, monkeypatch):
    """Two texts of one size; nothing is kept beside them."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    path = tmp_path / "quick.py"
    for name in ("first", "other"):
        path.write_text(f"import rollplex as rx\n@rx.algorithm\ndef {name}(prompts, *, actor):\n    pass\n")
        os.utime(path, (1, 1))
        assert load_algorithm(path).name == name
    assert list(tmp_path.iterdir()) == [path]


def test_roles_are_known_by_use_and_hosts_by_rx_host():
    assert dict(grpo().roles) == {"actor": "policy", "reference": "frozen"}
    assert grpo().hosts == ("reward",)


def test_roles_are_known_by_annotation(tmp_path):
    body = START.replace("score = rx.host(reward)(prompts, rollout)", "loss = rx.masked_mean(logp, rollout.mask)")
    signature = "prompts: rx.Prompts, *, actor: rx.Policy, reference: rx.Frozen, n: int = 8"
    algorithm = made(tmp_path, body + "reference.logprobs(prompts, rollout)\nactor.update(loss)\n", signature)
    assert dict(algorithm.roles) == {"actor": "policy", "reference": "frozen"}


def test_parameters_are_numbers_that_python_may_decide_on(tmp_path):
    body = START + (
        "total = logp\n"
        "for _ in range(n):\n"
        "    total = total + clip\n"
        "if n > 3:\n"
        "    total = total * 2\n"
        "actor.update(rx.masked_mean(total, rollout.mask))\n"
    )
    algorithm = made(tmp_path, body)
    assert len([n for n in algorithm.trace({"n": 4}).nodes if g.op_name(n) == "operator.add"]) == 4
    assert all(g.op_name(n) != "operator.mul" for n in algorithm.trace({"n": 3}).nodes)


def test_reassigned_names_stay_apart(tmp_path):
    body = START + "x = logp * 2\nx = x + score\nx = x.exp()\nactor.update(rx.masked_mean(x, rollout.mask))\n"
    graph = made(tmp_path, body).trace()
    assert [n.name for n in graph.nodes if n.meta.get("label") == "x"] == ["x", "x_1", "x_2"]


def test_tracing_twice_gives_the_same_graph_and_leaves_no_state():
    algorithm = grpo()
    assert str(algorithm.trace()) == str(algorithm.trace())
    assert str(algorithm.trace({"n": 4})) != str(algorithm.trace())


def test_dsl_functions_compute_when_they_are_given_tensors():
    """One definition for the user, the graph and the runtime."""
    score = torch.tensor([[1.0, 3.0], [2.0, 2.0]])
    assert torch.allclose(rx.group_normalize(score, 2)[0], torch.tensor([-1.0, 1.0]) / 2**0.5)
    assert rx.group_normalize(score, 2)[1].abs().max() == 0
    mask = torch.tensor([[True, False], [True, True]])
    assert rx.masked_mean(score, mask) == 5 / 3
    assert rx.masked_sum(score, mask.float()) == 5
    assert rx.host(lambda a, b: a + b)(1, 2) == 3


def test_padding_that_holds_inf_does_not_reach_a_masked_mean():
    x = torch.tensor([1.0, float("inf")])
    assert rx.masked_mean(x, torch.tensor([True, False])) == 1
    assert rx.masked_mean(x, torch.tensor([False, False])) == 0


def test_dependence_in_grpo():
    """
    prompts --> rollout --> ref_logp, logp, score --> .. --> loss --> update
    """
    graph = grpo().trace()
    assert names(set(graph.nodes) - g.response_dependent(graph)) == {"prompts", "output"}
    attached = names(g.attached(graph))
    assert {"logp", "ratio", "delta", "loss"} <= attached
    assert not {"rollout", "rollout_logprobs", "score", "advantage", "ref_logp"} & attached


@pytest.mark.parametrize("op", ["detach()", "gt(0)", "ne(1)"])
def test_detached_values_and_decisions_carry_no_gradient(tmp_path, op):
    body = START + f"free = logp.{op}\nactor.update(rx.masked_mean(logp * free, rollout.mask))\n"
    graph = made(tmp_path, body).trace()
    assert "free" not in names(g.attached(graph))


def test_a_copy_shares_no_node_and_no_meta():
    graph = grpo().trace()
    copy = g.copy_graph(graph)
    assert str(copy) == str(graph)
    assert not set(copy.nodes) & set(graph.nodes)
    g.node_named(copy, "loss").meta["label"] = "other"
    assert g.node_named(graph, "loss").meta["label"] == "loss"
    assert all(not set(n.all_input_nodes) & set(graph.nodes) for n in copy.nodes)


def test_host_functions_of_a_module_are_recorded_by_their_address(tmp_path):
    body = START + "from os.path import join\nother = rx.host(join)(prompts, rollout)\n"
    body += "actor.update(rx.masked_mean(logp * (score + other), rollout.mask))\n"
    graph = made(tmp_path, body).trace()
    assert [n.args[0] for n in g.find(graph, ops.host)] == ["reward", "posixpath:join"]


def test_the_package_itself_does_not_import_torch():
    code = "import sys, rollplex; assert 'torch' not in sys.modules; rollplex.algorithm; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_the_package_exports_is_there():
    assert all(getattr(rx, name) is not None for name in rx.__all__)
    assert set(rx.__all__) <= set(dir(rx))
    with pytest.raises(AttributeError, match="nothing"):
        rx.nothing  # noqa: B018
