"""The reward of the shapes example, a rule, no model; and what an environment says between turns."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ANSWER = re.compile(r"<answer>([^<]*)</answer>")


def answer_text(answer: str) -> str:
    """How a response states its answer."""
    return f"<answer>{answer}</answer>"


def exact_answer(question: str, answer: str, response: str, row: Mapping[str, Any]) -> float:
    """1 when the response states exactly one answer in tags and it is the right one, else 0."""
    stated = ANSWER.findall(response)
    return float(len(stated) == 1 and stated[0].strip().lower() == answer.lower())


def hint(question: str, answer: str, response: str, row: Mapping[str, Any], turn: int) -> str:
    """The next message to the model: right or wrong after each turn, and how the answer begins after the second."""
    if exact_answer(question, answer, response, row):
        return "Right. Say it again."
    return "Wrong." if turn == 1 else f"Wrong. It begins with {answer[0]}."
