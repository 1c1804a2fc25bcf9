"""What rollout engines share: the rank in the plan, and what it hands over; how tokens are sampled is a `Sampler`'s."""
