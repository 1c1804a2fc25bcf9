"""Types have the dims a reader would write down, and the graph executes as if tensors knew the names of their dims."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import golden
import pytest
import torch
from algorithms import START, grpo, job, made, step_values, typed
from hypothesis import given, settings
from hypothesis import strategies as st
from job_texts import tiny
from torch import Tensor
from torch.fx import Graph

from rollplex.ir import graph as g
from rollplex.ir.errors import GraphError
from rollplex.ir.job import load_job
from rollplex.ir.module import Module
from rollplex.ir.records import evaluate, to_records
from rollplex.ir.torch_ops import TORCH_OPS
from rollplex.ir.types import DIMS, StructType, TensorType, nbytes
from rollplex.passes.infer_types import InferTypes, Types, common_dims, missing_axes, result_type

END = "actor.update(rx.masked_mean(logp, rollout.mask))\n"
torch.set_num_threads(1)


def type_of(folder: Path, expression: str) -> str:
    """The type of `x = expression` on a rollout, as it prints."""
    return str(typed(made(folder, START + f"x = {expression}\n" + END))[Types].types["x"])


def test_golden_of_grpo():
    golden.check("grpo_types.txt", f"{typed(grpo())[Types]}\n")


@pytest.mark.parametrize(
    ("expression", "says"),
    [
        ("rollout.tokens * 1", "int64 [prompt, group, response] response"),
        ("rollout.lengths + 0", "int64 [prompt, group] response"),
        ("prompts.tokens + 0", "int64 [prompt, token]"),
        ("prompts.lengths + 0", "int64 [prompt]"),
        ("logp * score", "float32 [prompt, group, response] attached response"),
        ("score * logp", "float32 [prompt, group, response] attached response"),
        ("logp * score.mean(-1)", "float32 [prompt, group, response] attached response"),
        ("score - score.mean(-1)", "float32 [prompt, group] response"),
        ("score - score.mean(1, keepdim=True)", "float32 [prompt, group] response"),
        ("score.mean(1, keepdim=True) * score.mean(1)", "float32 [prompt, 1] response"),
        ("logp.sum((0, 1))", "float32 [response] attached response"),
        ("logp.sum(1) * score.mean(1)", "float32 [prompt, response] attached response"),
        ("torch.mean(input=score, axis=1, keepdims=True)", "float32 [prompt, 1] response"),
        ("logp.cumsum(-1)", "float32 [prompt, group, response] attached response"),
        ("logp.mean()", "float32 [] attached response"),
        ("logp.detach()", "float32 [prompt, group, response] response"),
        ("logp > 0", "bool [prompt, group, response] response"),
        ("logp.double()", "float64 [prompt, group, response] attached response"),
        ("logp.to(torch.int64) * 1.5", "float32 [prompt, group, response] response"),
        ("torch.where(rollout.mask, logp, 0)", "float32 [prompt, group, response] attached response"),
        ("torch.argmax(logp, 1)", "int64 [prompt, response] response"),
        ("rollout.mask & (score > 0)", "bool [prompt, group, response] response"),
        ("score[..., None]", "float32 [prompt, group, 1] response"),
        ("rx.masked_sum(logp, rollout.mask)", "float32 [] attached response"),
        ("rx.masked_mean(score, rollout.mask)", "float32 [] response"),
        ("rx.group_normalize(logp, n)", "float32 [prompt, group, response] attached response"),
        ("rx.host(reward, returns='sample_prompts')(prompts)", "Prompts [prompt, group]"),
        ("rx.host(reward, returns='rollout')(prompts)", "Rollout [prompt, group]"),
        ("reference.prefix(prompts)", "Boundary [prompt]"),
        ("actor.prefix(prompts)", "Boundary [prompt] attached"),
    ],
)
def test_type(tmp_path, expression, says):
    assert type_of(tmp_path, expression) == says


def test_in_a_float64_job_log_probabilities_and_scores_are_float64(tmp_path):
    algorithm = made(tmp_path, START + END)
    module = InferTypes().run(Module(algorithm.trace({"n": 2}), load_job(tiny(tmp_path)), algorithm))
    assert str(module[Types].types["logp"]) == "float64 [prompt, group, response] attached response"
    assert str(module[Types].types["score"]) == "float64 [prompt, group] response"


def test_sizes_are_those_of_the_job_for_one_rank():
    """32 prompts x 8 responses x 2048 tokens x 4 bytes; four ranks have 8 prompts each."""
    logp = TensorType(("prompt", "group", "response"))
    assert nbytes(logp, job()) == 32 * 8 * 2048 * 4
    assert nbytes(logp, job(), data_parallel=4) == 8 * 8 * 2048 * 4
    assert nbytes(TensorType(("prompt", "1"), "int64"), job()) == 32 * 8
    assert nbytes(StructType("Rollout", ("prompt", "group")), job()) == 32 * 8 * (2048 * (8 + 4 + 1) + 8)
    assert nbytes(StructType("Prompts"), job()) == 32 * (8192 * (8 + 1) + 8)


def test_what_is_legal_but_surely_not_meant_is_a_warning(tmp_path):
    body = START + "unused = reference.logprobs(prompts, rollout)\nactor.update(logp.mean())\n"
    assert typed(made(tmp_path, body))[Types].warnings == (
        "made.py:10: `Tensor.mean` over response positions counts padding; rx.masked_mean(x, rollout.mask) does not",
        "made.py:9: `unused` is never used, yet reference's model runs for it",
    )
    assert typed(grpo())[Types].warnings == ()


def test_the_graph_given_is_left_as_it_was():
    graph = grpo().trace()
    before = str(graph)
    InferTypes().run(Module(graph, job(), grpo()))
    assert str(graph) == before
    assert all("type" not in n.meta for n in graph.nodes)


def test_flags_agree_with_the_walks_over_the_graph():
    graph = typed(grpo()).graph
    for node in graph.nodes:
        found = node.meta.get("type")
        if isinstance(found, TensorType):
            assert found.attached == (node in g.attached(graph)), node
            assert found.response_dependent == (node in g.response_dependent(graph)), node


# --------------------------------------------------------------------------------------------- broadcasting by name


@pytest.mark.parametrize(
    ("dims", "common", "axes"),
    [
        (("prompt", "group"), ("prompt", "group", "response"), (2,)),
        (("prompt",), ("prompt", "group", "response"), (1, 2)),
        (("prompt", "1"), ("prompt", "group", "response"), (2,)),
        (("group", "response"), ("prompt", "group", "response"), ()),
        (("prompt", "response"), ("prompt", "group", "response"), (1,)),
        (("group",), ("prompt", "group", "response"), (1,)),
        ((), ("prompt", "group"), ()),
        (("prompt",), ("prompt", "1"), (1,)),
        (("prompt", "1", "1"), ("prompt", "group"), None),
    ],
)
def test_where_to_unsqueeze(dims, common, axes):
    assert missing_axes(dims, common) == axes


def test_the_widest_operand_gives_the_dims():
    assert common_dims([("prompt",), ("prompt", "group"), ()]) == ("prompt", "group")
    assert common_dims([("prompt",), ("prompt", "1")]) == ("prompt", "1")
    with pytest.raises(GraphError, match="cannot align"):
        common_dims([("prompt", "token"), ("prompt", "group")])


@dataclass(frozen=True)
class Named:
    """A tensor that knows its dims: broadcasting by name done the slow way, as the oracle."""

    value: Tensor
    dims: tuple[str, ...]

    def over(self, dims: tuple[str, ...]) -> Tensor:
        """The value with every dim of `dims`, of length one where it has none."""
        lengths = dict(zip(self.dims, self.value.shape, strict=True))
        return self.value.reshape([lengths.get(d, 1) for d in dims])


ATOMS = {
    "logp": ("prompt", "group", "response"),
    "score": ("prompt", "group"),
    "score.mean(1)": ("prompt",),
    "score.mean(0)": ("group",),
    "logp.sum(1)": ("prompt", "response"),
    "logp.sum(0)": ("group", "response"),
    "logp.amax((0, 1))": ("response",),
    "score.mean()": (),
}


@st.composite
def products(draw: st.DrawFn) -> list[str]:
    return draw(st.lists(st.sampled_from(sorted(ATOMS)), min_size=2, max_size=4))


@settings(max_examples=80, deadline=None)
@given(products())
def test_products_broadcast_by_name(atoms):
    """x = ((a * b) * c): evaluated from the typed graph and by names."""
    # One length for all dims: positions alone would broadcast anything with anything.
    given_values = step_values(prompts=3, group=3, length=3)
    env: dict[str, Any] = {k: given_values[k] for k in ("rollout", "score", "logp")}
    with tempfile.TemporaryDirectory() as folder:
        algorithm = made(Path(folder), START + f"x = {' * '.join(f'({a})' for a in atoms)}\n" + END)
        if not nested(atoms):
            with pytest.raises(GraphError, match="cannot align"):
                typed(algorithm)
            return
        graph = typed(algorithm).graph
    named = [Named(eval(a, {}, env), ATOMS[a]) for a in atoms]
    dims = tuple(d for d in DIMS if any(d in n.dims for n in named))
    expected = torch.ones(())
    for n in named:
        expected = expected * n.over(dims)
    found = evaluate(to_records(graph), env, ["x"])["x"]
    assert g.type_of(g.node_named(graph, "x")).dims == dims  # type: ignore[union-attr]
    assert torch.equal(found, expected)


def nested(atoms: list[str]) -> bool:
    """Whether each product has one operand whose dims contain the other's: what may be aligned."""
    dims: set[str] = set()
    for i, atom in enumerate(atoms):
        other = set(ATOMS[atom])
        if i and not (dims <= other or other <= dims):
            return False
        dims |= other
    return True


ARGUMENTS = ("x", "x1", "xx", "xxx", "m", "mm", "mxx", "xm1", "xd")


def sampled(graph: Graph, letters: str) -> tuple[Any, ...]:
    """Arguments: x floats and m a mask [prompt, group, response], 1 a number, d a tuple of dims."""
    made_of: dict[str, Any] = {"1": 1, "d": (1,)}
    for letter, dtype in (("x", "float32"), ("m", "bool")):
        made_of[letter] = graph.placeholder(letter)
        made_of[letter].meta["type"] = TensorType(("prompt", "group", "response"), dtype)
    return tuple(made_of[letter] for letter in letters)


@pytest.mark.parametrize("row", TORCH_OPS.values(), ids=TORCH_OPS)
def test_every_op_of_the_list_has_a_type_for_some_arguments_and_a_reason_for_all_others(row):
    found, reasons = [], []
    for letters in ARGUMENTS:
        graph = Graph()
        node = graph.call_function(row.run, sampled(graph, letters))
        try:
            found.append(result_type(node, row))
        except GraphError as err:
            reasons.append(err.problems[0])
    assert found
    assert all(row.name in reason.what and reason.hint for reason in reasons)
