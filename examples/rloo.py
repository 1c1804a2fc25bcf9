"""RLOO: REINFORCE whose baseline is the mean reward of the other responses of the same prompt; no clipping, no critic.

Ahmadian et al., Back to Basics: Revisiting REINFORCE Style Optimization for Learning from Human Feedback in LLMs,
arXiv 2402.14740, section 2.2 (REINFORCE on whole responses) and section 3.2 (the leave-one-out estimator). Differs from
GRPO: a response is one action with the probability of the whole sequence, its advantage is not divided by the deviation
of the group, and the KL to the reference is part of the reward.
"""

import rollplex as rx


@rx.algorithm
def rloo(prompts, *, actor, reference, reward, n=4, kl=0.03):
    rollout = actor.generate(prompts, n=n)
    ref_logp = reference.logprobs(prompts, rollout)
    logp = actor.logprobs(prompts, rollout)
    score = rx.host(reward)(prompts, rollout)
    total = score - kl * rx.sequence_sum(rollout.logprobs - ref_logp, rollout.mask)
    others = (total.sum(1, keepdim=True) - total) / (n - 1)
    loss = -((total - others) * rx.sequence_sum(logp, rollout.mask)).mean()
    actor.update(loss)
