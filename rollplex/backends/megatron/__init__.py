"""Megatron-Core as trainer and scorer."""
