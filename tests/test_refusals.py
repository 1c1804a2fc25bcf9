"""What an algorithm may not say: each mistake is refused at the user's line, with what to write instead."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest
from algorithms import SIGNATURE, START, job, made, typed

from rollplex.ir.errors import GraphError
from rollplex.ir.loading import load_algorithm
from rollplex.ir.loss import split_loss

UPDATE = """\
loss = rx.masked_mean(-logp * score, rollout.mask)
actor.update(loss)
"""
CASES = Path(__file__).parent / "goldens" / "refusals.txt"


@dataclass(frozen=True)
class Case:
    """One entry of refusals.txt: a body after START, and the message."""

    name: str
    signature: str
    body: str
    message: str

    def __str__(self) -> str:
        return self.name


def cases() -> list[Case]:
    return [parsed(text) for text in CASES.read_text().split("== ")[1:]]


def parsed(text: str) -> Case:
    head, message = text.split(">>\n")
    name, _, body = head.partition("\n")
    signature = SIGNATURE
    if body.startswith("def: "):
        first, _, body = body.partition("\n")
        signature = first.removeprefix("def: ")
    return Case(name, signature, body, message.strip())


def compile_it(folder: Path, body: str, signature: str = SIGNATURE) -> None:
    """All that looks at an algorithm: tracing, types, the split of its loss."""
    split_loss(typed(made(folder, START + body.replace("UPDATE\n", UPDATE), signature)).graph)


def test_the_body_that_all_cases_spoil_is_fine(tmp_path):
    compile_it(tmp_path, "UPDATE\n")


@pytest.mark.parametrize("case", cases(), ids=str)
def test_refused(tmp_path, case):
    with pytest.raises(GraphError) as error:
        compile_it(tmp_path, case.body, case.signature)
    assert str(error.value) == case.message


def test_responses_of_generate_are_the_jobs(tmp_path):
    with pytest.raises(GraphError, match=r"made.py:6: generate has n=4, the job samples workload.group=8"):
        typed(made(tmp_path, START + UPDATE), {"n": 4})


def test_a_group_of_one_has_no_deviation(tmp_path):
    body = START + "a = rx.group_normalize(score, n)\nactor.update(rx.masked_mean(logp * a, rollout.mask))\n"
    with pytest.raises(GraphError, match=r"made.py:9: a group of one response has no deviation"):
        typed(made(tmp_path, body), {"n": 1}, "workload.group=1")
    assert job("workload.group=1").workload.group == 1


def test_a_role_that_the_job_does_not_have(tmp_path):
    algorithm = made(tmp_path, START + "ref = reference.logprobs(prompts, rollout)\n" + UPDATE)
    with pytest.raises(GraphError, match=r"made.py:9: the job has no role `reference`\n.*add roles.reference"):
        algorithm.trace({}, {"actor": "policy"})


def test_a_role_of_the_job_that_is_never_called(tmp_path):
    with pytest.raises(GraphError, match=r"role `referee` is never called by made\n.*actor"):
        made(tmp_path, START + UPDATE).trace({}, {"actor": "policy", "referee": "frozen"})


def test_a_frozen_role_of_the_job_cannot_be_updated(tmp_path):
    with pytest.raises(GraphError, match=r"made.py:6: `actor` is frozen and cannot generate"):
        made(tmp_path, START + UPDATE).trace({}, {"actor": "frozen"})


def test_job_and_annotation_must_agree(tmp_path):
    algorithm = made(tmp_path, START + UPDATE, "prompts, *, actor: rx.Policy, reward, n=8")
    with pytest.raises(GraphError, match=r"made.py:5: `actor` is policy in the algorithm and frozen in the job"):
        algorithm.trace({}, {"actor": "frozen"})


def test_an_unknown_parameter_is_suggested(tmp_path):
    with pytest.raises(GraphError, match=r"made.py:5: made has no parameter `clipp`\n.*did you mean `clip`"):
        made(tmp_path, START + UPDATE).trace({"clipp": 0.1})


@pytest.mark.parametrize(
    "signature", ["*, actor, reward, n=8", "prompts, actor, reward", "prompts, *args, n=8", "p, **roles"]
)
def test_the_form_of_the_signature(tmp_path, signature):
    with pytest.raises(GraphError, match=r"made.py:5: made must take the prompts, then keyword-only arguments"):
        made(tmp_path, "pass", signature)


def test_a_class_is_no_algorithm():
    import rollplex as rx

    with pytest.raises(GraphError, match=r"needs a function.*\n.*above a def"):
        rx.algorithm(dict)


# --------------------------------------------------------------------------------------------------------- files

FILES = {
    "no algorithm": ("x = 1\n", "user.py: no @rx.algorithm function"),
    "two algorithms": (
        "import rollplex as rx\n"
        "@rx.algorithm\ndef one(prompts, *, actor): ...\n"
        "@rx.algorithm\ndef two(prompts, *, actor): ...\n",
        "user.py: 2 algorithms: one, two\n    try: name one of them",
    ),
    "a syntax error": ("x = 1\ndef f(:\n", "user.py:2: not Python: invalid syntax"),
    "a missing package": ("import os\nimport no_such_package\n", "user.py:2: ModuleNotFoundError: No module named 'no"),
    "an error while it is imported": ("def f():\n    return {}['k']\nf()\n", "user.py:2: KeyError: 'k'"),
    "an exit": ("import sys\nsys.exit(3)\n", "user.py:2: SystemExit: 3"),
    "a tab": ("if 1:\n\tx = 1\n        y = 1\n", "user.py:3: not Python: "),
    "a null byte": ("x = '\0'\n", "user.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_loaded(tmp_path, name):
    text, says = FILES[name]
    path = tmp_path / "user.py"
    path.write_text(text)
    with pytest.raises(GraphError, match=re.escape(says)):
        load_algorithm(path)


def test_a_file_that_is_not_there_or_not_python(tmp_path):
    with pytest.raises(GraphError, match=r"there is no file .*grpo\.py"):
        load_algorithm(tmp_path / "grpo.py")
    (tmp_path / "grpo.yaml").write_text("")
    with pytest.raises(GraphError, match=r"an algorithm is a Python file"):
        load_algorithm(tmp_path / "grpo.yaml")
    (tmp_path / "binary.py").write_bytes(b"\xff\xfe\x00x")
    with pytest.raises(GraphError, match=r"binary\.py"):
        load_algorithm(tmp_path / "binary.py")


def test_a_name_chooses_and_is_suggested(tmp_path):
    path = tmp_path / "user.py"
    path.write_text(FILES["two algorithms"][0])
    assert load_algorithm(path, "two").name == "two"
    with pytest.raises(GraphError, match=r"no algorithm `twoo`\n.*did you mean `two`"):
        load_algorithm(path, "twoo")


def test_an_imported_algorithm_counts_where_none_is_defined(tmp_path):
    (tmp_path / "base_of_user.py").write_text(FILES["two algorithms"][0].split("@rx.algorithm\ndef two")[0])
    (tmp_path / "user.py").write_text("from base_of_user import one\n")
    assert load_algorithm(tmp_path / "user.py").name == "one"
