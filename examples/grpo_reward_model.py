"""GRPO whose scores come from a reward model: a frozen role with a model of its own, instead of a host function.

Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision): the loss is that of grpo.py. The
prefix of the judge needs no response either, so it runs beside the rollout, as that of the reference does.
"""

import torch

import rollplex as rx


@rx.algorithm
def grpo(prompts, *, actor, reference, judge, n=8, clip=0.2, kl=0.04):
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(prompts, rollout)
    score = judge.score(prompts, rollout)  # one number a response, read at its last token
    logp = actor.logprobs(prompts, rollout)
    advantage = rx.group_normalize(score, n)
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    delta = ref_logp - logp
    loss = rx.masked_mean(-policy + kl * (torch.exp(delta) - delta - 1), rollout.mask)
    actor.update(loss)
