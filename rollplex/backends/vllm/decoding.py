"""One step's sampling by vLLM: every response is a request with a seed of its own, handed over when it is awaited.

    requests  p0 r0 .. p0 r7 | p1 r0 .. p1 r7 | ..      in this order; responses of a prompt share its prefix blocks

All requests decode together, whoever is waited for. The scheduler's decisions depend on the requests alone, not on the
clock, so the ranks of a tensor-parallel engine make the same ones and a step gives the same bits every time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.vllm.inputs import engine_input
from rollplex.ir.errors import EngineError


@dataclass(frozen=True)
class Asked:
    """What is sampled: `n` responses a prompt of up to `max_tokens`, until a token of `eos`; pad tokens by modality."""

    n: int
    max_tokens: int
    temperature: float
    eos: tuple[int, ...]
    pads: Mapping[str, int]

    def params(self, seed: int, have: int) -> SamplingParams:
        """Of one response that has `have` tokens: the end token is its last, and no other rule ends it."""
        return SamplingParams(
            temperature=self.temperature,
            seed=seed % 2**63,
            max_tokens=self.max_tokens - have,
            stop_token_ids=list(self.eos),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


class VllmDecoding:
    """`Decoding` over an engine that this step has to itself."""

    def __init__(
        self, engine: Any, prompts: PromptBatch, asked: Asked, seeds: Sequence[int], begun: Rollout | None, version: int
    ) -> None:
        """`begun` are responses to the first prompts that a step has left; their tokens are prefilled again."""
        self._engine, self._asked, self._version = engine, asked, version
        self._prompts = len(prompts)
        self._made = _begin(len(prompts), asked, begun)
        self._waiting: dict[str, tuple[int, int]] = {}
        for p, prompt in enumerate(prompts):
            for r in range(asked.n):
                self._ask(prompt, p, r, seeds[p])

    def until(self, prompts: Sequence[int]) -> Rollout:
        """Decode until the last response to these prompts has ended; they alone, in this order."""
        wanted = set(prompts)
        while any(p in wanted for p, _ in self._waiting.values()):
            self._step()
        return self._made.rows(prompts)

    def first(self, count: int) -> tuple[Rollout, Rollout]:
        """Decode until `count` prompts have all of their responses: those, and the others as far as they are."""
        complete = self._complete([])
        while len(complete) < count:
            self._step()
            complete += self._complete(complete)
        self._abort()
        taken = set(complete[:count])
        left = [p for p in range(self._prompts) if p not in taken]
        return self._made.rows(sorted(taken)), self._made.rows(left)

    def _ask(self, prompt: Prompt, p: int, r: int, seed: int) -> None:
        """One response, unless it has ended already."""
        asked, have = self._asked, int(self._made.lengths[p, r])
        tokens = self._made.tokens[p, r, :have].tolist()
        if have == asked.max_tokens or (tokens and tokens[-1] in asked.eos):
            return
        name = f"{p}.{r}"
        self._engine.add_request(name, engine_input(prompt, asked.pads, tokens), asked.params(seed + r, have))
        self._waiting[name] = (p, r)

    def _step(self) -> None:
        """One step of the engine: what it has sampled is written down. EngineError where it has preempted a request."""
        for output in self._engine.step():
            p, r = self._waiting[output.request_id]
            self._write(p, r, output.outputs[0])
            if output.finished:
                del self._waiting[output.request_id]
        live = self._engine.engine_core.engine_core.scheduler.requests.values()
        if preempted := sum(request.num_preemptions for request in live):
            what = f"vLLM has preempted {preempted} requests, for which the plan has blocks of KV"
            raise EngineError(what, where="vllm", hint="raise roles.actor.rollout.kv_cache_gib")

    def _write(self, p: int, r: int, new: Any) -> None:
        """Tokens that a response has beyond those that are there."""
        made, start = self._made, int(self._made.lengths[p, r])
        stop = start + len(new.token_ids)
        made.tokens[p, r, start:stop] = torch.tensor(list(new.token_ids))
        found = [at[token].logprob for at, token in zip(new.logprobs, new.token_ids, strict=True)]
        made.logprobs[p, r, start:stop] = torch.tensor(found)
        made.versions[p, r, start:stop] = self._version
        made.lengths[p, r] = stop

    def _complete(self, but: Sequence[int]) -> list[int]:
        """Prompts of which no response is awaited any more, without those that are known."""
        decoding = {p for p, _ in self._waiting.values()}
        return [p for p in range(self._prompts) if p not in decoding and p not in but]

    def _abort(self) -> None:
        """What is awaited still is nobody's concern any more."""
        self._engine.abort_request(list(self._waiting))
        self._waiting.clear()


def _begin(prompts: int, asked: Asked, begun: Rollout | None) -> Rollout:
    """Room for all responses, with the tokens of those that go on."""
    shape = (prompts, asked.n, asked.max_tokens)
    made = Rollout(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape[:2], dtype=torch.int64),
        torch.zeros(shape),
        torch.arange(prompts),
        torch.zeros(shape, dtype=torch.int32),
    )
    if begun is not None:
        for into, found in zip(made.fields, begun.fields, strict=True):
            if into is not made.taken:
                into[: len(found)] = found
    return made
