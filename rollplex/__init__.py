"""Rollplex: a compiler and a runtime for RL post-training of vision-language models."""

__version__ = "0.1.0"
