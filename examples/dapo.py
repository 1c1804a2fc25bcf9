"""DAPO: clip-higher, dynamic sampling, one vote a token, and a soft penalty for responses that come close to the limit.

Yu et al., DAPO: An Open-Source LLM Reinforcement Learning System at Scale, arXiv 2503.14476, equations 8 to 13. Differs
from GRPO: the clip range is wider upwards (section 3.1); groups whose answers are all right or all wrong are sampled
again, as often as workload.dynamic_sampling says, and those that stay so are left out of the loss (3.2); the loss is a
mean over tokens (3.3); the last `cache` tokens of a response cost reward (3.4); no KL, so no reference.
"""

import torch

import rollplex as rx


@rx.algorithm
def dapo(prompts, *, actor, reward, n=16, clip_low=0.2, clip_high=0.28, longest=20480, cache=4096):
    rollout = actor.generate(prompts, n=n)
    logp = actor.logprobs(prompts, rollout)
    correct = rx.host(reward)(prompts, rollout)
    informative = correct.amax(1, keepdim=True) > correct.amin(1, keepdim=True)
    overlong = ((longest - cache - rollout.lengths) / cache).clamp(-1, 0)  # equation 13
    advantage = rx.group_normalize(correct + overlong, n)
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)
    loss = rx.masked_mean(-policy, rollout.mask & informative)
    actor.update(loss)
