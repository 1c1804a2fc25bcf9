"""GRPO: group-relative advantages, the clipped surrogate, and an unbiased estimate of the KL to a frozen reference.

Shao et al., DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language Models, arXiv 2402.03300,
section 4.1; the loss is averaged over all response tokens of the step.
"""

import torch

import rollplex as rx


@rx.algorithm
def grpo(prompts, *, actor, reference, reward, n=8, clip=0.2, kl=0.04):
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(prompts, rollout)
    logp = actor.logprobs(prompts, rollout)  # training forward, attached to autograd
    score = rx.host(reward)(prompts, rollout)  # any Python callable, run on the host
    advantage = rx.group_normalize(score, n)
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    delta = ref_logp - logp
    loss = rx.masked_mean(-policy + kl * (torch.exp(delta) - delta - 1), rollout.mask)
    actor.update(loss)
