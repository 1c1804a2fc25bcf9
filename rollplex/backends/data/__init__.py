"""From rows of a data set to prompts, and what rollout makes of them."""
