"""Dr. GRPO: GRPO without its two biases. Scores are centred, not divided by their deviation, and every response counts
by its tokens over one constant budget, so that long wrong answers are not cheaper a token than short ones.

Liu et al., Understanding R1-Zero-Like Training: A Critical Perspective, arXiv 2503.20783, section 3.2.
"""

import torch

import rollplex as rx


@rx.algorithm
def dr_grpo(prompts, *, actor, reward, n=8, clip=0.2, budget=2048):
    rollout = actor.generate(prompts, n=n)
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    advantage = score - score.mean(1, keepdim=True)
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    response = torch.where(rollout.mask, -policy, 0.0).sum(-1) / budget
    loss = response.mean()
    actor.update(loss)
