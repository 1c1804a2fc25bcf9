"""Configurations that somebody really ran, as jobs, and what a plan must say of each."""
