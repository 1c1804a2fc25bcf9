"""vLLM as rollout engine."""
