"""GSPO: importance ratio, clipping and reward all belong to the whole response, not to its tokens.

Zheng et al., Group Sequence Policy Optimization, arXiv 2507.18071, section 4.1, equations 5 to 7: the ratio of a
response is the geometric mean of its token ratios. Differs from GRPO: one clipped term a response instead of one a
token, so a clip range a hundred times narrower; no KL. Made for mixtures of experts, whose token ratios are noisy.
"""

import torch

import rollplex as rx


@rx.algorithm
def gspo(prompts, *, actor, reward, n=8, clip_low=3e-4, clip_high=4e-4):
    rollout = actor.generate(prompts, n=n)
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    advantage = rx.group_normalize(score, n)
    ratio = torch.exp(rx.sequence_mean(logp - rollout.logprobs, rollout.mask))
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    loss = -policy.mean()
    actor.update(loss)
