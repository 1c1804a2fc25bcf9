"""Multi-turn GRPO of an agent that sees: one reward a trajectory, its group-relative advantage on every response token.

Wang et al., RAGEN, arXiv 2504.20073 (StarPO: whole trajectories are sampled, and their normalised rewards train every
turn); Wang et al., VAGEN, arXiv 2510.16907, for observations that are images. Clip and KL are GRPO's, arXiv 2402.03300.
Differs from GRPO: an environment answers each response with an observation, n trajectories of a prompt go their own
ways, and the loss is a mean over the response tokens of all turns; what the environment shows is read, not trained on.
"""

import torch

import rollplex as rx


@rx.algorithm
def embodied(prompts, *, actor, reference, environment, reward, n=8, turns=3, clip=0.2, kl=0.04):
    history, rollout, trajectory, losses = prompts, actor.generate(prompts, n=n), [], []
    for turn in range(turns):
        ref_logp = reference.logprobs(history, rollout)
        logp = actor.logprobs(history, rollout)  # its prefix extends that of the turn before
        trajectory.append((rollout, ref_logp, logp))
        if turn + 1 < turns:
            history = rx.observe(environment)(history, rollout)  # history, response, and what is seen then
            rollout = actor.generate(history, n=1)
    advantage = rx.group_normalize(rx.host(reward)(history, rollout), n)
    for rollout, ref_logp, logp in trajectory:
        ratio = torch.exp(logp - rollout.logprobs)
        policy = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage)
        delta = ref_logp - logp
        losses.append(-policy + kl * (torch.exp(delta) - delta - 1))
    actor.update(rx.trajectory_mean(losses, [rollout.mask for rollout, _, _ in trajectory]))
