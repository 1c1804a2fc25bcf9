"""PPO with a critic: advantages by GAE, the clipped surrogate, and a KL penalty of every token inside the reward.

Schulman et al., Proximal Policy Optimization Algorithms, arXiv 1707.06347, equations 7 and 9 (clipped surrogate, value
loss); Schulman et al., arXiv 1506.02438, equation 16 (GAE); Ouyang et al., InstructGPT, arXiv 2203.02155, equation 2
(the KL penalty in the reward). Differs from GRPO: a second model learns what to expect, so a prompt needs no group; the
KL stands in the reward, not in the loss. One update a rollout, so clipping the value loss would change nothing.
"""

import torch

import rollplex as rx


@rx.algorithm
def ppo(prompts, *, actor, critic, reference, reward, n=4, clip=0.2, kl=0.05, gamma=1.0, lam=0.95):
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(prompts, rollout)
    values = critic.values(prompts, rollout)  # attached: the critic is trained as well
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    rewards = rx.at_end(score, rollout.mask) - kl * (rollout.logprobs - ref_logp)
    advantage = rx.gae(rewards, values, rollout.mask, gamma, lam)  # a constant of both losses
    target = advantage + values.detach()
    ratio = torch.exp(logp - rollout.logprobs)
    policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
    policy_loss = rx.masked_mean(-policy, rollout.mask)
    value_loss = 0.5 * rx.masked_mean((values - target) ** 2, rollout.mask)
    critic.update(value_loss)
    actor.update(policy_loss)
