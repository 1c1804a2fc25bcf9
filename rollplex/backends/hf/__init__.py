"""Transformers' own modules over memory that the caller owns."""
