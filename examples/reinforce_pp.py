"""REINFORCE++: PPO's clipped loss and token-wise KL without a critic; advantages are normalised over the whole batch.

Hu et al., REINFORCE++: Stabilizing Critic-Free Policy Optimization with Global Normalization, arXiv 2501.03262: a
token's advantage is the reward of its response less the KL of all tokens from it on; then mean and deviation of all
tokens of the batch are taken out. Differs from GRPO: nothing is normalised within a group, so n may be 1; the KL stands
in the advantage.
"""

import torch

import rollplex as rx


@rx.algorithm
def reinforce_pp(prompts, *, actor, reference, reward, n=4, clip=0.2, kl=0.01):
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(prompts, rollout)
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    penalty = (rollout.logprobs - ref_logp).masked_fill(~rollout.mask, 0)
    to_come = penalty.flip(-1).cumsum(-1).flip(-1)  # of this token and all behind it
    advantage = rx.whiten(score - kl * to_come, rollout.mask)
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    loss = rx.masked_mean(-policy, rollout.mask)
    actor.update(loss)
