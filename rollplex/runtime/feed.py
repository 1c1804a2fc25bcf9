"""The controller's tasks: prompts in, the user's host functions in between.

load    rows of the step (steprows.py) -> decoded, tokenized prompts; of a later round, in place of those left out
host    reward(question, answer, response, row), once for every response -> scores [prompt, group]
        environment(response, history, row, ..), likewise -> what is seen then, the histories of the next turn

A host function takes, by name, what it wants of: question, answer (of the row), response (its text), row (the whole
JSONL object), tokens (ids), index (of the response in its group), turn (1, 2, ..), history (the text before the
response). It returns one number; what it means when it does not is `run.reward_failure`. An environment returns the
text of the next message to the model; where it does not, the run stops.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from rollplex.backends.carried import Carried
from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.encode import PromptMaker
from rollplex.backends.data.histories import Histories, extended
from rollplex.backends.data.parts import wholes_of
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.data.rows import Row
from rollplex.backends.data.tokens import end_tokens, response_text
from rollplex.backends.engine import Values
from rollplex.backends.training.placement import DTYPES
from rollplex.ir.errors import DataError
from rollplex.ir.job import Job
from rollplex.ir.parts import group_of, round_of, whole
from rollplex.ir.plan import Plan, references
from rollplex.ir.planned_hosts import early_hosts
from rollplex.ir.steps import Run
from rollplex.runtime.background import Later
from rollplex.runtime.calls import Call, HostCalls, Limits, message, score
from rollplex.runtime.hostvalues import as_prompts, as_rollout, early_calls, returned
from rollplex.runtime.offers import EARLY_OFFERS, asked, parameters_of, row_data
from rollplex.runtime.rounds import RoundLog
from rollplex.runtime.steprows import RoundRows, StepRows


class Feed:
    """`Tasks` of the controller. `hosts` are the user's functions by the algorithm's parameter names.

    `metrics` and `failures` (calls of host functions that counted as a score) are those of the iteration.
    """

    def __init__(
        self, plan: Plan, job: Job, rows: Sequence[Row], maker: PromptMaker, hosts: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.plan = plan
        self.job = job
        self.rows = rows
        self.maker = maker
        self.hosts = hosts
        self.metrics: dict[str, float] = {}
        self.failures: list[str] = []
        self._scores: dict[str, Tensor] = {}
        limits = Limits(job.run.reward_timeout_s, job.run.reward_workers, job.run.reward_failure)
        self._host_calls = {name: HostCalls(function, name, limits) for name, function in hosts.items()}
        again = plan.summary.rounds
        self._rounds = RoundLog(plan, job, again, RoundRows(job, len(rows))) if again else None
        self._order = self._rounds.rows if self._rounds else StepRows(job, len(rows))
        self._eos = end_tokens(maker.tokenizer)
        self._records = {record.name: record for record in plan.graph if record.op in ("rx.host", "rx.generate")}
        self._sampled = [record.name for record in plan.graph if record.op == "rx.generate"]
        self._early = early_hosts(plan)
        self._iteration = -1
        self._ahead: Later[PromptBatch] | None = None

    def begin(self, iteration: int) -> None:
        self._iteration = iteration
        self.metrics, self.failures = {}, []
        self._scores = {}
        if self._rounds:
            self._rounds.begin()

    def run(self, step: Run, inputs: Mapping[str, Any]) -> Values:
        match step.task:
            case "load":
                return dict.fromkeys(step.outputs, self._load_again(inputs) if inputs else self._load())
            case "host" if self._records[step.node].kwargs.get("returns") == "history":
                return dict.fromkeys(step.outputs, self._observe(step, inputs))
            case "host" if step.node in self._early or returned(self.plan, step.node) != "scores":
                return dict.fromkeys(step.outputs, self._made(step, inputs))
            case "host":
                return dict.fromkeys(step.outputs, self._host(step, inputs))
            case _:
                raise AssertionError(f"{step.task} is no task of the controller")

    def carried(self) -> Carried:
        """What the rows are, and those that the next step goes on with; all others follow from the step."""
        step = self._iteration + 1
        going_on = self._order.carried(step)
        return Carried(facts={"rows": len(self.rows), "data": self._data, "step": step, "going_on": going_on})

    def restore(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        if (facts["rows"], facts["data"]) != (len(self.rows), self._data):
            what = f"it holds other rows than the run began with ({len(self.rows)}, then {facts['rows']})"
            raise DataError(what, where=self.job.run.data or "run.data", hint="bring the file of that run back")
        self._order.begin(facts["step"], facts["going_on"])

    @cached_property
    def _data(self) -> str:
        """sha256 of all rows as the user wrote them."""
        seen = sha256()
        for row in self.rows:
            seen.update(json.dumps(row_data(row), sort_keys=True, default=str).encode())
        return seen.hexdigest()

    def rows_of(self, iteration: int) -> list[Row]:
        """The rows that one step samples for, as `StepRows` deals them out."""
        return [self.rows[place] for place in self._order.of(iteration)]

    # ---- load

    def _load(self) -> PromptBatch:
        ahead, self._ahead = self._ahead, None
        batch = ahead.result() if ahead else self._batch(self._iteration)
        if self._rounds:
            self._rounds.samples(len(batch))
        return batch

    def _load_again(self, inputs: Mapping[str, Any]) -> PromptBatch:
        """The prompts of a later round: the next rows of the data in place of those whose groups were left out."""
        assert self._rounds, "a load takes values where a step has rounds"
        numbers = self._rounds.left_out(inputs)
        self._rounds.samples(len(numbers))
        places = self._rounds.rows.again(self._iteration, numbers)
        prompts = next(value for value in inputs.values() if isinstance(value, PromptBatch))
        return prompts.again({n: self._prompt(self.rows[at]) for n, at in zip(numbers, places, strict=True)})

    def _batch(self, iteration: int) -> PromptBatch:
        return PromptBatch(tuple(self._prompt(row) for row in self.rows_of(iteration)), self._eos)

    def _load_ahead(self) -> None:
        """Make the next step's prompts while this step trains: decoding is over then, and a core is free."""
        following = self._iteration + 1
        if self._ahead is None and following < self.job.run.steps:
            self._ahead = Later(lambda: self._batch(following), "load ahead")

    def _prompt(self, row: Row) -> Prompt:
        """A prompt longer than the plan's budget is refused here, with its row."""
        prompt, most = self.maker(row), self.job.workload.prompt_tokens
        if stated := prompt.response_lengths:
            _check_lengths(stated, row.id, self.job)
        if len(prompt.input_ids) > most:
            raise DataError(
                f"the prompt has {len(prompt.input_ids)} tokens, the plan allows {most}",
                where=row.id,
                hint="raise workload.prompt_tokens, or lower workload.frames or workload.max_pixels",
            )
        if prompt.pixel_values is None:
            return prompt
        # In the model's dtype from the start: an engine that had to cast them would save a second copy for backward.
        return replace(prompt, pixel_values=prompt.pixel_values.to(DTYPES[self.job.model.dtype]))

    # ---- host functions

    def _host(self, step: Run, inputs: Mapping[str, Any]) -> Tensor:
        """Scores [prompts, group] of all responses, or of those to one group of every data-parallel rank, or a round's.

        Where there are rounds the last one's are those of the step: no response is judged twice.
        """
        name, (made,) = self.plan.hosts[step.node], step.outputs
        scores = self._rated(name, list(self._calls(step, inputs)))
        if self._rounds and step.node in self._rounds.hosts:
            so_far = self._rounds.scored(step.node, self._judged(step, inputs), scores)
            if round_of(made) is not None:
                return scores
            scores = so_far
            self.metrics[f"{name}_sampled"] = self._rounds.mean_of_all(step.node)
            self.metrics |= self._rounds.settled(self._iteration, step.node, inputs)
        self._scores[made] = scores
        if group_of(made) in (None, self.job.prompts_per_rank - 1):
            self.metrics[name] = float(wholes_of(self._scores)[whole(made)].mean())
            self._order.took(self._iteration, self._responses(step.node, inputs).taken.tolist())
            self._load_ahead()
        return scores

    def _judged(self, step: Run, inputs: Mapping[str, Any]) -> Sequence[int]:
        """The numbers of the prompts whose responses a host function is called for: all, or those of its round."""
        taken = self._responses(step.node, inputs).taken.tolist()
        if not self._rounds or step.node not in self._rounds.hosts:
            return taken
        prompts = next(value for value in inputs.values() if isinstance(value, PromptBatch))
        return [number for number in taken if prompts.due is None or number in prompts.due]

    def _rated(self, name: str, calls: Sequence[Call]) -> Tensor:
        """What a host function says of each call [prompts, group]; a failure is the job's number, or ends the run."""
        found, failure = self._host_calls[name].each(calls, score), self.job.run.reward_failure
        numbers = [number if number is not None else float(failure) for number in found.results]
        if failure != "stop":
            told = f"{name}_failures"
            self.metrics[told] = self.metrics.get(told, 0) + len(found.failures)
            self.failures += [f"{calls[i].row}: {what}" for i, what in found.failures.items()]
        return torch.tensor(numbers, dtype=self._dtype).view(-1, self.job.group)

    @property
    def _dtype(self) -> torch.dtype:
        """Of scores."""
        return torch.float64 if self.job.model.dtype == "float64" else torch.float32

    def _made(self, step: Run, inputs: Mapping[str, Any]) -> Any:
        """What a host function makes before the rollout, or of its responses: prompts or others (hostvalues.py)."""
        node, name, kind = step.node, self.plan.hosts[step.node], returned(self.plan, step.node)
        group = 1 if kind == "prompts" else self.job.group
        if node in self._early:
            rows = self.rows_of(self._iteration)
            taken, wanted = torch.arange(len(rows)), parameters_of(self.hosts[name], name, EARLY_OFFERS)
            calls = early_calls([asked(row) for row in rows], wanted, group)
        else:
            taken, calls = self._responses(node, inputs).taken, list(self._calls(step, inputs))
            rows = [self.rows_of(self._iteration)[number] for number in taken.tolist()]
        if kind == "scores":
            scores = self._rated(name, calls)
            self.metrics[name] = float(scores.mean())
            return scores
        limits = Limits(self.job.run.reward_timeout_s, self.job.run.reward_workers, "stop")
        texts = [str(text) for text in HostCalls(self.hosts[name], name, limits).each(calls, message).results]
        if kind == "rollout":
            shape = (len(rows), group, self.job.workload.response_tokens)
            return as_rollout(texts, calls, self.maker, shape, taken, self._dtype)
        each = [row for row in rows for _ in range(group)]
        return as_prompts(texts, each, lambda row, text: self._prompt(replace(row, question=text)), group, self._eos)

    def _observe(self, step: Run, inputs: Mapping[str, Any]) -> Histories:
        """What every trajectory's next response follows: its history, its response, and what is seen then."""
        node = step.node
        name, (_, rollout) = self.plan.hosts[node], self._arguments(node)
        calls = list(self._calls(step, inputs))
        limits = Limits(self.job.run.reward_timeout_s, self.job.run.reward_workers, "stop")
        said = HostCalls(self.hosts[name], name, limits).each(calls, message).results
        seen = iter(zip(calls, said, strict=True))
        found = []
        for p in range(self.job.workload.prompts):
            group = zip(self._histories(node, inputs, p), inputs[rollout].responses(p), strict=True)
            found.append(tuple(self._extended(h, response, *next(seen)) for h, response in group))
        return Histories(tuple(found), self._eos)

    def _extended(self, history: Prompt, response: Tensor, call: Call, seen: str | None) -> Prompt:
        assert isinstance(seen, str), "a run stops where an environment says nothing"
        tokens, load = self.maker.message(seen, ended=int(response[-1]) in self._eos), self.job.workload
        most = load.new_tokens - load.response_tokens
        if len(tokens) > most:
            raise DataError(
                f"the observation has {len(tokens)} tokens, the plan allows {most}",
                where=call.row,
                hint="raise workload.turns.observation_tokens, or let the environment say less",
            )
        return extended(history, response, tokens)

    def _turn(self, sampled: str) -> int:
        return self._sampled.index(sampled) + 1

    def _arguments(self, node: str) -> tuple[str, str]:
        """The history and the responses that a host function is called with."""
        rollout = next(n for n in reversed(self._sampled) if n in references(self._records[node].args))
        return next(references(self._records[rollout].args)), rollout

    def _histories(self, node: str, inputs: Mapping[str, Any], prompt: int) -> Sequence[Prompt]:
        """What each response of a prompt follows."""
        found = inputs[self._arguments(node)[0]][prompt]
        return found if isinstance(found, tuple) else [found] * self.job.group

    def _responses(self, node: str, inputs: Mapping[str, Any]) -> Rollout:
        """The responses that a host function judges: all of the step's, or those of one group."""
        sampled = self._arguments(node)[1]
        return next(value for name, value in inputs.items() if whole(name) == sampled)

    def _calls(self, step: Run, inputs: Mapping[str, Any]) -> Iterator[Call]:
        """One call a response, with those of `OFFERS` that the function takes."""
        node, judged = step.node, frozenset(self._judged(step, inputs))
        name, rollout, turn = self.plan.hosts[node], self._responses(node, inputs), self._turn(self._arguments(node)[1])
        wanted, rows = parameters_of(self.hosts[name], name), self.rows_of(self._iteration)
        within = f", turn {turn}" if len(self._sampled) > 1 else ""
        within += f", round {step.microbatch + 1}" if self._rounds and node in self._rounds.hosts else ""
        for at, number in ((at, n) for at, n in enumerate(rollout.taken.tolist()) if n in judged):
            row = rows[number]
            for i, tokens in enumerate(rollout.responses(at)):
                text = response_text(self.maker.tokenizer, tokens.tolist())
                offered = asked(row) | {"response": text, "tokens": tokens.tolist(), "index": i, "turn": turn}
                if "history" in wanted:
                    offered["history"] = self.maker.text_of(self._histories(node, inputs, number)[i])
                yield Call(f"{row.id}, response {i}{within}", {k: v for k, v in offered.items() if k in wanted})


def _check_lengths(stated: Sequence[int], row: str, job: Job) -> None:
    """A length for each response of the group, none beyond the plan's budget."""
    load = job.workload
    if load.turns is not None:
        raise DataError("response_lengths are of one turn, the plan has several", where=row, hint="leave them out")
    if len(stated) != load.group or max(stated) > load.response_tokens:
        what = f"it states {len(stated)} response_lengths of up to {max(stated)} tokens"
        hint = f"state {load.group}, of at most {load.response_tokens} tokens: workload.group, workload.response_tokens"
        raise DataError(what, where=row, hint=hint)
