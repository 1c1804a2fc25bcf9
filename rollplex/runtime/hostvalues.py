"""What host functions make beside the scores of responses: prompts, responses, and what needs no response.

early   host(prompts) -> scores, prompts or a rollout          before decode, of question, answer, row and index
late    host(prompts, rollout) -> sample_prompts or a rollout   called as one that scores is, for every response

A prompt is the text of another question to the media of its row; a response is its text, ended with the end token. Its
`logprobs` are 0: nobody sampled it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.encode import PromptMaker
from rollplex.backends.data.histories import Histories
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.ir.errors import DataError
from rollplex.ir.plan import Plan
from rollplex.runtime.calls import Call

OF_EARLY = ("scores", "prompts", "rollout")
OF_LATE = ("scores", "history", "sample_prompts", "rollout")


def returned(plan: Plan, node: str) -> str:
    """What a host function returns: `scores`, unless the algorithm says otherwise."""
    return next(str(r.kwargs.get("returns", "scores")) for r in plan.graph if r.name == node)


def early_calls(offered: Sequence[Mapping[str, Any]], wanted: frozenset[str], group: int) -> list[Call]:
    """One call for each response that there will be, or for each prompt where `group` is 1; `offered` of each row."""
    return [
        Call(f"{row['row']['id']}, {index}", {k: v for k, v in {**row, "index": index}.items() if k in wanted})
        for row in offered
        for index in range(group)
    ]


def as_prompts(
    texts: Sequence[str], of: Sequence[Any], make: Callable[[Any, str], Prompt], group: int, eos: tuple[int, ...]
) -> PromptBatch | Histories:
    """The prompts that these questions make of rows `of`, one for each text: [prompt], or [prompt, group]."""
    made = [make(row, text) for row, text in zip(of, texts, strict=True)]
    if group == 1:
        return PromptBatch(tuple(made), eos)
    return Histories(tuple(tuple(made[i : i + group]) for i in range(0, len(made), group)), eos)


def as_rollout(
    texts: Sequence[str],
    calls: Sequence[Call],
    maker: PromptMaker,
    shape: tuple[int, int, int],
    taken: Tensor,
    dtype: torch.dtype,
) -> Rollout:
    """Responses [prompt, group, token] of these texts; DataError for one that is longer than the budget."""
    prompts, group, most = shape
    tokenizer: Any = maker.tokenizer
    tokens, ends = torch.zeros(len(texts), most, dtype=torch.int64), []
    for i, (text, call) in enumerate(zip(texts, calls, strict=True)):
        ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if len(ids) > most:
            what = f"the response has {len(ids)} tokens, the plan allows {most}"
            hint = "raise workload.response_tokens, or let the host function say less"
            raise DataError(what, where=call.row, hint=hint)
        tokens[i, : len(ids)] = torch.tensor(ids)
        ends.append(len(ids))
    nothing = torch.zeros(prompts, group, most, dtype=dtype)
    lengths = torch.tensor(ends, dtype=torch.int64).view(prompts, group)
    return Rollout(tokens.view(prompts, group, most), lengths, nothing, taken, nothing.int())
