"""A graph prints as the program the user wrote, and the print is a program with the same graph."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import golden
import pytest
from algorithms import EXAMPLES, HEAD, SIGNATURE, START, grpo, made, split, typed
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx import Graph, Node

from rollplex.ir import graph as g
from rollplex.ir.loading import load_algorithm
from rollplex.ir.printer import body_lines, print_graph

IMPORTS = "import torch\nimport rollplex as rx\n\n"


def bare(line: str) -> str:
    """A line without its comment and white space."""
    return re.sub(r"\s+", "", line.split("#")[0])


def test_grpo_prints_as_it_was_written():
    written = (EXAMPLES / "grpo.py").read_text().split("def grpo")[1].splitlines()[1:]
    assert [bare(text) for text, _ in body_lines(grpo().trace())] == [bare(line) for line in written]


def test_grpo_traced_with_values_keeps_its_parameters_by_name():
    text = print_graph(grpo().trace({"clip": 0.3, "n": 4}))
    assert "ratio.clamp(1 - clip, 1 + clip)" in text
    assert "n=4, clip=0.3, kl=0.04" in text


def test_what_a_role_is_said_to_be_is_printed_too(tmp_path):
    signature = "prompts: rx.Prompts, *, actor: rx.Policy, reference: rx.Frozen, reward, n: int = 8"
    body = START + "reference.logprobs(prompts, rollout)\nactor.update(rx.masked_mean(logp, rollout.mask))\n"
    text = print_graph(made(tmp_path, body, signature).trace())
    assert text.splitlines()[1].startswith("def made(prompts, *, actor: rx.Policy, reference: rx.Frozen, reward, n=8):")


def test_after_infer_types_the_program_still_reads_the_same():
    """The unsqueezes of broadcasting by name are there and are not shown."""
    module = typed(grpo())
    assert any(n.meta.get("implicit") for n in module.graph.nodes)
    assert print_graph(module.graph) == print_graph(grpo().trace())


def test_golden_of_the_split_graph():
    """
    kv_ref   = reference.prefix(prompts)            # grpo.py:15
    ref_logp = reference.suffix(kv_ref, rollout)    # grpo.py:15
    """
    golden.check("grpo_split.txt", print_graph(split(grpo()).graph))


def test_the_split_graph_is_a_program_too(tmp_path):
    text = print_graph(split(grpo()).graph)
    path = tmp_path / "again.py"
    path.write_text(IMPORTS + text)
    assert shape(load_algorithm(path).trace()) == shape(split(grpo()).graph)


FORMS = [
    "x = -(logp - score) - (score - 1)",
    "x = (-logp) ** 2 - -(logp**2 + 1)",
    "x = 2 ** -logp",
    "x = logp * score / (score / 2)",
    "x = (logp < 0) & ~(score > 0) | (score == logp)",
    "x = torch.where(logp >= score, logp, -1e-06)",
    "x = (1 - clip) * logp + clip**2 * (n - 1)",
    "x = (logp - 1).clamp(max=3).abs()",
    "x = abs(logp) / 2 % 3",
    "x = score[..., None] * logp[:, :, None][:, :, 0]",
    "x = torch.nn.functional.softplus(logp).to(torch.float32)",
    "x = logp.masked_fill(~rollout.mask, float(\"-inf\"))",
    "x = torch.amax(logp, dim=(0, 1), keepdim=True)",
    "x = rx.group_normalize(score, n, eps=0.1)",
    "x = rx.host(reward, returns='rollout')(prompts, score)",
    "x = reference.logprobs(prompts, rollout)",
    "x = torch.logaddexp(logp, score * logp)",
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_expressions_keep_their_brackets(tmp_path, form):
    """Every operator and call prints as it was written: no bracket lost, none added."""
    body = START + form + "\nactor.update(rx.masked_mean(logp, rollout.mask))\n"
    lines = [text for text, _ in body_lines(made(tmp_path, body).trace())]
    assert [bare(line) for line in lines][3] == bare(form)


def test_temporaries_used_once_are_inlined_and_those_used_twice_get_a_line(tmp_path):
    path = tmp_path / "helped.py"
    helper = "def twice(x):\n    return x * x\n"
    body = START + "actor.update(rx.masked_mean(twice(logp + 1), rollout.mask))\n"
    path.write_text(helper + HEAD.format(signature=SIGNATURE) + "".join(f"    {line}\n" for line in body.splitlines()))
    lines = [text for text, _ in body_lines(load_algorithm(path).trace())]
    assert lines[-2:] == ["add = logp + 1", "actor.update(rx.masked_mean(add * add, rollout.mask))"]


# ------------------------------------------------------------------------------------- random programs, and back

UNARY = [
    "-{}",
    "torch.exp({})",
    "{}.abs()",
    "{}.clamp(-1, 1 + clip)",
    "torch.sigmoid({})",
    "({}).detach()",
    "({}) ** 2",
]
BINARY = [
    "({}) + ({})",
    "({}) - ({})",
    "({}) * ({})",
    "({}) / ({})",
    "torch.minimum({}, {})",
    "torch.where(({}) > 0, {}, clip)",
]


@st.composite
def programs(draw: st.DrawFn) -> str:
    """Random torch maths on a rollout: a DAG of named values, some used often, some never."""
    names = ["logp", "score", "rollout.logprobs", "rollout.mask", "kl"]
    lines = ["rollout = actor.generate(prompts, n=n)", "logp = actor.logprobs(prompts, rollout)"]
    lines += ["score = rx.host(reward)(prompts, rollout)", "kl = reference.logprobs(prompts, rollout) - logp"]
    for i in range(draw(st.integers(1, 8))):
        form = draw(st.sampled_from(UNARY + BINARY + ["{}", "({}) * 0.5", "1 - ({})"]))
        value = form.format(*(expression(draw, names) for _ in range(form.count("{}"))))
        if not value.isidentifier():
            lines.append(f"x{i} = {value}")
            names.append(f"x{i}")
    return "\n".join([*lines, f"actor.update(rx.masked_mean(logp * {names[-1]}, rollout.mask))"]) + "\n"


def expression(draw: st.DrawFn, names: list[str], depth: int = 2) -> str:
    if depth == 0 or draw(st.booleans()):
        return draw(st.sampled_from(names))
    form = draw(st.sampled_from(UNARY + BINARY))
    return "(" + form.format(*(expression(draw, names, depth - 1) for _ in range(form.count("{}")))) + ")"


def shape(graph: Graph) -> dict[str, int]:
    """A graph without order, temporary names and implicit broadcasts: every named value with a hash of what it is."""
    key: dict[Node, str] = {}
    for node in graph.nodes:
        inside = g.map_nodes((node.args, node.kwargs), key)
        key[node] = str(hash((node.op, node.name if node.op == "placeholder" else str(node.target), str(inside))))
        if node.meta.get("implicit"):
            key[node] = key[node.all_input_nodes[0]]
    return {n.name: int(k) for n, k in key.items() if n.meta.get("label") or g.is_model_call(n)}


@settings(max_examples=60, deadline=None)
@given(programs())
def test_print_and_trace_are_inverse(body):
    with tempfile.TemporaryDirectory() as folder:
        graph = made(Path(folder), body).trace()
        printed = print_graph(graph)
        path = Path(folder) / "again.py"
        path.write_text(IMPORTS + printed)
        again = load_algorithm(path).trace()
        assert {k: v for k, v in shape(again).items() if k in shape(graph)} == shape(graph)
        assert [bare(t) for t, _ in body_lines(again)] == [bare(t) for t, _ in body_lines(graph)]


@settings(max_examples=60, deadline=None)
@given(programs())
def test_response_dependence_is_reachability(body):
    """Against paths enumerated one by one, from every node back to `generate`."""
    with tempfile.TemporaryDirectory() as folder:
        graph = made(Path(folder), body).trace()

    def reaches_generate(node: Node) -> bool:
        return g.op_name(node) == "generate" or any(reaches_generate(i) for i in node.all_input_nodes)

    late = g.response_dependent(graph)
    assert late == {n for n in graph.nodes if n.op != "output" and reaches_generate(n)}
