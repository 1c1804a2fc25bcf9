"""One step's sampling by vLLM: every response is a request with a seed of its own, handed over when it is awaited.

    requests  p0 r0 | p1 r0 | ..                      one a prompt: it prefills the prompt and samples its first token
              p0 r1 .. p0 r7 | p1 r1 .. p1 r7 | ..    when that is there, the others find the prompt's blocks

vLLM looks for blocks when it admits a request, and none are there yet of a prompt that is prefilled in pieces: admitted
together, responses would each prefill it anew, into blocks that no plan has. All requests decode together, whoever is
waited for. Where the scheduler's decisions depend on the requests alone, the ranks of a tensor-parallel engine make the
same ones and a step gives the same bits every time; on one GPU it prepares steps ahead of time (sampler.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from vllm.sampling_params import RequestOutputKind, SamplingParams

from rollplex.backends.data.batch import PromptBatch
from rollplex.backends.data.prompts import Prompt
from rollplex.backends.data.rollout import Rollout
from rollplex.backends.vllm.inputs import EngineInput
from rollplex.ir.errors import EngineError


@dataclass(frozen=True)
class Asked:
    """What is sampled: `n` responses a prompt of up to `max_tokens`, until a token of `eos`; pad tokens by modality."""

    n: int
    max_tokens: int
    temperature: float
    eos: tuple[int, ...]
    pads: Mapping[str, int]

    def ends(self, prompt: Prompt, r: int) -> tuple[int, tuple[int, ...]]:
        """Most tokens of a prompt's response `r`, and the tokens that end it before."""
        return (prompt.response_lengths[r], ()) if prompt.response_lengths else (self.max_tokens, self.eos)

    def params(self, seed: int, most: int, eos: tuple[int, ...]) -> SamplingParams:
        """Of one response that may have `most` more tokens: a token of `eos` is its last, and no other rule ends it."""
        return SamplingParams(
            temperature=self.temperature,
            seed=seed % 2**63,
            max_tokens=most,
            stop_token_ids=list(eos),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


@dataclass(frozen=True)
class Request:
    """A response of a prompt, as vLLM is asked for it."""

    prompt: int
    response: int
    input: dict[str, Any]
    params: SamplingParams


class VllmDecoding:
    """`Decoding` over an engine that this step has to itself."""

    def __init__(
        self,
        engine: Any,
        prompts: PromptBatch,
        asked: Asked,
        seeds: Sequence[int],
        begun: Rollout | None,
        version: int,
        live: Callable[[int, int], None],
    ) -> None:
        """`begun` are responses to the first prompts that a step has left; their tokens are prefilled again.

        `live` hears how many responses decode, and how many tokens the last of them to begin has got.
        """
        self._engine, self._asked, self._version, self._live = engine, asked, version, live
        self._prompts = len(prompts)
        self._made = _begin(len(prompts), asked, begun)
        self._waiting: dict[str, tuple[int, int]] = {}
        self._new: dict[tuple[int, int], tuple[list[int], list[float]]] = {}
        self._behind: dict[int, list[Request]] = {}
        self._unbegun: set[str] = set()
        self._tokens = 0
        for p, prompt in enumerate(prompts):
            self._behind[p] = [*self._requests(prompt, p, seeds[p])]
            if self._behind[p]:
                self._ask(self._behind[p].pop(0))
        self._tell()

    def until(self, prompts: Sequence[int]) -> Rollout:
        """Decode until the last response to these prompts has ended; they alone, in this order."""
        wanted = set(prompts)
        while any(p in wanted for p, _ in self._waiting.values()):
            self._step()
        self._settle()
        return self._written().rows(prompts)

    def first(self, count: int) -> tuple[Rollout, Rollout]:
        """Decode until `count` prompts have all of their responses: those, and the others as far as they are."""
        complete = self._complete([])
        while len(complete) < count:
            self._step()
            complete += self._complete(complete)
        self._abort()
        taken, made = set(complete[:count]), self._written()
        left = [p for p in range(self._prompts) if p not in taken]
        return made.rows(sorted(taken)), made.rows(left)

    def _requests(self, prompt: Prompt, p: int, seed: int) -> Iterator[Request]:
        """One for each response to a prompt that has not ended already."""
        asked, source = self._asked, EngineInput(prompt, self._asked.pads)
        for r in range(asked.n):
            have, (most, eos) = int(self._made.lengths[p, r]), asked.ends(prompt, r)
            tokens = self._made.tokens[p, r, :have].tolist()
            if have < most and not (tokens and tokens[-1] in eos):
                yield Request(p, r, source.with_response(tokens), asked.params(seed + r, most - have, eos))

    def _ask(self, request: Request) -> None:
        name = f"{request.prompt}.{request.response}"
        self._engine.add_request(name, request.input, request.params)
        self._waiting[name] = (request.prompt, request.response)
        self._unbegun.add(name)

    def _step(self) -> None:
        """One step of the engine: what it has sampled is kept. EngineError where it has preempted a request."""
        outputs = self._engine.step()
        for output in outputs:
            p, r = self._waiting[output.request_id]
            self._keep(p, r, output.outputs[0])
            self._unbegun.discard(output.request_id)
            for request in self._behind.pop(p, ()):
                self._ask(request)
            if output.finished:
                del self._waiting[output.request_id]
        if outputs:
            self._tokens += not self._unbegun
            self._tell()
        live = self._engine.engine_core.engine_core.scheduler.requests.values()
        if preempted := sum(request.num_preemptions for request in live):
            what = f"vLLM has preempted {preempted} requests, for which the plan has blocks of KV"
            raise EngineError(what, where="vllm", hint="raise roles.actor.rollout.kv_cache_gib")

    def _tell(self) -> None:
        """How many decode, or are about to; all get a token a step, so that steps since the last began are its own."""
        self._live(len(self._waiting) + sum(len(requests) for requests in self._behind.values()), self._tokens)

    def _keep(self, p: int, r: int, new: Any) -> None:
        """Tokens that a response has beyond those that are there: as lists, which cost a step less than tensors."""
        tokens, logprobs = self._new.setdefault((p, r), ([], []))
        tokens += new.token_ids
        logprobs += [at[token].logprob for at, token in zip(new.logprobs, new.token_ids, strict=True)]

    def _written(self) -> Rollout:
        """All responses as far as they are."""
        made = self._made
        for (p, r), (tokens, logprobs) in self._new.items():
            start = int(made.lengths[p, r])
            stop = start + len(tokens)
            made.tokens[p, r, start:stop] = torch.tensor(tokens)
            made.logprobs[p, r, start:stop] = torch.tensor(logprobs)
            made.versions[p, r, start:stop] = self._version
            made.lengths[p, r] = stop
        self._new.clear()
        return made

    def _complete(self, but: Sequence[int]) -> list[int]:
        """Prompts of which no response is awaited any more, without those that are known."""
        decoding = {p for p, _ in self._waiting.values()}
        return [p for p in range(self._prompts) if p not in decoding and p not in but]

    def _abort(self) -> None:
        """What is awaited still is nobody's concern any more."""
        self._engine.abort_request(list(self._waiting))
        self._waiting.clear()
        self._behind.clear()
        self._settle()

    def _settle(self) -> None:
        """Once nothing is awaited nothing may run: the pages of keys and values go."""
        while not self._waiting and self._engine.engine_core.engine_core.batch_queue:
            self._engine.step()


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
