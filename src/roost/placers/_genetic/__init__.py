"""The genetic algorithm over biased random keys, compiled."""
