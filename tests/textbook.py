"""Every algorithm of examples/ as a textbook has it: whole sequences, one loss a role, torch.optim; nothing of ours.

ours                                         independent
prefix | suffix, group by group              transformers' own forward on prompt + response, a head of torch.nn
the plan's loss, taken apart by group        loops over prompts, responses and tokens
chunks, streamed state                       clip_grad_norm_, torch.optim.AdamW on whole parameters
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from rollplex.backends.data.prompts import Prompt
from rollplex.backends.hf.precision import keep_double
from rollplex.backends.training.placement import PREFIXES
from rollplex.ir.job import Job

Score = Callable[[list[int]], float]
Tokens = dict[tuple[int, ...], Tensor]
"""By prompt and response, and by turn where there are several: a number for each token of the response."""


class Whole:
    """One role's model in float64 on whole sequences; `score` is its scalar head, if it has one."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        parsed = Qwen2_5_VLConfig.from_dict(dict(config))
        self.model: Any = Qwen2_5_VLForConditionalGeneration(parsed).double().train()
        self.score = nn.Linear(int(config["hidden_size"]), 1, bias=False, dtype=torch.float64)
        keep_double(self.model)
        own = dict(self.model.named_parameters()) | {"score.weight": self.score.weight}
        self.parameters = {name: own[name] for name in weights}
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    def hidden(self, prompt: Prompt, response: Tensor) -> Tensor:
        """[prompt + response, hidden]; a sampled token is text, even where it is that of a video's patch."""
        ids = torch.cat([prompt.input_ids, response])
        more = torch.arange(prompt.next_position, prompt.next_position + len(response)).expand(3, -1)
        embedded = self.model.model.language_model.embed_tokens(ids)
        if prompt.pixel_values is not None:
            seen = self.model.model.get_video_features(prompt.pixel_values.double(), prompt.grid_thw).pooler_output
            patches = (torch.arange(len(ids)) < len(prompt.input_ids)) & (ids == self.model.config.video_token_id)
            embedded = embedded.masked_scatter(patches[:, None], torch.cat(seen))
        return self.model.model.language_model(
            inputs_embeds=embedded[None], position_ids=torch.cat([prompt.position_ids, more], dim=1)[:, None],
            use_cache=False,
        ).last_hidden_state[0]  # fmt: skip

    def of(self, prompt: Prompt, response: Tensor) -> Tensor:
        """Log-probabilities of a response right behind a prompt."""
        return self.logprobs(self.hidden(prompt, response)[len(prompt.input_ids) - 1 :], response)

    def logprobs(self, hidden: Tensor, response: Tensor) -> Tensor:
        logits = self.model.lm_head(hidden[:-1])
        return logits.log_softmax(-1).gather(-1, response[:, None])[:, 0]

    def values(self, hidden: Tensor, response: Tensor) -> Tensor:
        return self.score(hidden[:-1])[:, 0]

    def rating(self, hidden: Tensor, response: Tensor) -> Tensor:
        return self.score(hidden[-1])[0]


@dataclass
class Step:
    """What one step knows: what was sampled and, by role, what the models say of it."""

    job: Job
    prompts: int
    group: int
    old: Tokens
    said: dict[str, Tokens]
    score: Tensor

    @property
    def logp(self) -> Tokens:
        return self.said["actor"]

    @property
    def ref(self) -> Tokens:
        return {at: x.detach() for at, x in self.said["reference"].items()}

    def setting(self, name: str, default: float) -> float:
        return float(self.job.algorithm.get(name, default) or 0)

    def each(self) -> list[tuple[int, int]]:
        return [(p, r) for p in range(self.prompts) for r in range(self.group)]

    def group_advantage(self, score: Tensor) -> Tensor:
        return torch.stack([(row - row.mean()) / (row.std() + 1e-6) for row in score])


def _clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def _mean(tokens: list[Tensor]) -> Tensor:
    return torch.cat(tokens).mean()


def grpo(step: Step) -> dict[str, Tensor]:
    advantage, terms = step.group_advantage(step.score), []
    for p, r in step.each():
        policy = _clipped((step.logp[p, r] - step.old[p, r]).exp(), advantage[p, r], 0.2, 0.2)
        delta = step.ref[p, r] - step.logp[p, r]
        terms.append(-policy + 0.04 * (delta.exp() - delta - 1))
    return {"actor": _mean(terms)}


def gspo(step: Step) -> dict[str, Tensor]:
    advantage, terms = step.group_advantage(step.score), []
    for p, r in step.each():
        ratio = (step.logp[p, r] - step.old[p, r]).mean().exp()
        terms.append(_clipped(ratio, advantage[p, r], 3e-4, 4e-4))
    return {"actor": -torch.stack(terms).mean()}


def rloo(step: Step) -> dict[str, Tensor]:
    kl = {at: 0.03 * (step.old[at] - step.ref[at]).sum() for at in step.each()}
    total, terms = {(p, r): step.score[p, r] - kl[p, r] for p, r in step.each()}, []
    for p, r in step.each():
        others = [total[p, q] for q in range(step.group) if q != r]
        terms.append(-(total[p, r] - sum(others) / len(others)) * step.logp[p, r].sum())
    return {"actor": torch.stack(terms).mean()}


def reinforce_pp(step: Step) -> dict[str, Tensor]:
    raw: Tokens = {}
    for p, r in step.each():
        penalty = step.old[p, r] - step.ref[p, r]
        raw[p, r] = torch.stack([step.score[p, r] - 0.01 * penalty[t:].sum() for t in range(len(penalty))])
    every = torch.cat(list(raw.values()))
    spread = (every.var(correction=0) + 1e-8).sqrt()
    terms = []
    for at in step.each():
        advantage = (raw[at] - every.mean()) / spread
        terms.append(-_clipped((step.logp[at] - step.old[at]).exp(), advantage, 0.2, 0.2))
    return {"actor": _mean(terms)}


def dapo(step: Step) -> dict[str, Tensor]:
    longest, cache = step.setting("longest", 20480), step.setting("cache", 4096)
    score = step.score.clone()
    for p, r in step.each():
        over = len(step.old[p, r]) - (longest - cache)
        score[p, r] -= 0 if over <= 0 else min(over / cache, 1)
    advantage, terms = step.group_advantage(score), []
    for p, r in step.each():
        if len(set(step.score[p].tolist())) > 1:
            terms.append(-_clipped((step.logp[p, r] - step.old[p, r]).exp(), advantage[p, r], 0.2, 0.28))
    return {"actor": _mean(terms)}


def embodied(step: Step) -> dict[str, Tensor]:
    """GRPO's terms over the response tokens of all turns; one advantage a trajectory."""
    advantage, terms = step.group_advantage(step.score), []
    for at in step.logp:
        policy = _clipped((step.logp[at] - step.old[at]).exp(), advantage[at[:2]], 0.2, 0.2)
        delta = step.ref[at] - step.logp[at]
        terms.append(-policy + 0.04 * (delta.exp() - delta - 1))
    return {"actor": _mean(terms)}


def ppo(step: Step) -> dict[str, Tensor]:
    gamma, lam, policy, value = step.setting("gamma", 1.0), step.setting("lam", 0.95), [], []
    for p, r in step.each():
        v = step.said["critic"][p, r]
        reward = -0.05 * (step.old[p, r] - step.ref[p, r])
        reward[-1] += step.score[p, r]
        known = [*v.detach().tolist(), 0.0]
        deltas = [float(reward[t]) + gamma * known[t + 1] - known[t] for t in range(len(v))]
        found = [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(v))) for t in range(len(v))]
        advantage = torch.tensor(found, dtype=torch.float64)
        policy.append(-_clipped((step.logp[p, r] - step.old[p, r]).exp(), advantage, 0.2, 0.2))
        value.append(0.5 * (v - (advantage + v.detach())) ** 2)
    return {"actor": _mean(policy), "critic": _mean(value)}


LOSSES: dict[str, Callable[[Step], dict[str, Tensor]]] = {
    f.__name__: f for f in (grpo, gspo, rloo, reinforce_pp, dapo, embodied, ppo)
}


@dataclass
class Textbook:
    """One trainer; `models` by role, with the weights of theta_0. It keeps its own weights from step to step."""

    job: Job
    models: Mapping[str, Whole]
    loss: Callable[[Step], dict[str, Tensor]]
    losses: dict[str, float] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        o = self.job.optimizer
        for role in self.job.trained:
            frozen = tuple(prefix for part in self.job.roles[role].freeze for prefix in PREFIXES[part])
            for name, parameter in self.models[role].parameters.items():
                parameter.requires_grad_(not name.startswith(frozen or ("no name",)))
        self.optimizers = {
            role: torch.optim.AdamW(self._decayed(role), lr=o.lr, betas=o.betas, eps=o.eps) for role in self.job.trained
        }

    def _decayed(self, role: str) -> list[dict[str, Any]]:
        """Parameters that weight decay shrinks, and those that the job's patterns leave alone."""
        o, named = self.job.optimizer, self.models[role].parameters
        left = [n for n in named if any(fnmatch(n, pattern) for pattern in o.no_decay)]
        groups = ([n for n in named if n not in left], o.weight_decay), (left, 0.0)
        return [{"params": [named[n] for n in names], "weight_decay": decay} for names, decay in groups if names]

    def step(self, prompts: Any, rollouts: list[Any], histories: list[Any], score: Score) -> Step:
        """One step on what was sampled; `losses`, `norms` and `gradients` are then those of this step."""
        seen = self._seen(prompts, rollouts, histories, score)
        found = self.loss(seen)
        for role, optimizer in self.optimizers.items():
            optimizer.zero_grad()
            found[role].backward(retain_graph=True)
            parameters = self.models[role].parameters
            self.gradients[role] = {n: p.grad.clone() for n, p in parameters.items() if p.grad is not None}
            self.norms[role] = float(clip_grad_norm_(parameters.values(), self.job.optimizer.clip_norm or 1e30))
            self.losses[role] = float(found[role].detach())
        for optimizer in self.optimizers.values():
            optimizer.step()
        return seen

    def _seen(self, prompts: Any, rollouts: list[Any], histories: list[Any], score: Score) -> Step:
        said: dict[str, Tokens] = {role: {} for role in self.models}
        ruled: Tokens = {}
        for p, prompt in enumerate(prompts):
            for r in range(self.job.group):
                responses = [rollout.responses(p)[r] for rollout in rollouts]
                before = [prompt.input_ids, *(h[p][r].input_ids for h in histories)]
                whole = torch.cat([before[-1], responses[-1]])
                for role, model in self.models.items():
                    hidden = model.hidden(prompt, whole[len(prompt.input_ids) :])
                    for t, (start, response) in enumerate(zip(map(len, before), responses, strict=True)):
                        of = hidden[start - 1 : start + len(response)]
                        said[role][p, r, t] = SAYS.get(role, Whole.logprobs)(model, of, response)
                ruled[p, r, 0] = torch.tensor(score(responses[-1].tolist()), dtype=torch.float64)
        if len(rollouts) == 1:
            said = {role: {at[:2]: x for at, x in found.items()} for role, found in said.items()}
        shape, rated = (len(prompts), self.job.group), said.get("judge", ruled)
        old = {at: x.detach().clone() for at, x in said["actor"].items()}
        return Step(self.job, *shape, old, said, torch.stack([x.detach() for x in rated.values()]).view(shape))


SAYS: dict[str, Callable[..., Tensor]] = {"critic": Whole.values, "judge": Whole.rating}
