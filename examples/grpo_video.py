"""GRPO on video questions: the program of grpo.py with its reward bound, so that `rollplex run` can score responses.

Shao et al., DeepSeekMath, arXiv 2402.03300, section 4.1; the reward is a rule: 1 for the right answer in tags, else 0.
"""

import torch

import rollplex as rx
from shapes.reward import exact_answer

HOSTS = {"reward": exact_answer}


@rx.algorithm
def grpo(prompts, *, actor, reference, reward, n=8, clip=0.2, kl=0.04):
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(prompts, rollout)
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    advantage = rx.group_normalize(score, n)
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    delta = ref_logp - logp
    loss = rx.masked_mean(-policy + kl * (torch.exp(delta) - delta - 1), rollout.mask)
    actor.update(loss)
