"""Doubles, truths and problems that several tests and benchmarks share."""
