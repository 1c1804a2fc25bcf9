"""A pass and an algorithm that Rollplex finds because this package is installed."""
