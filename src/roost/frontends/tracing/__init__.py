"""Helpers of the front-ends: the trace of a PyTorch step, FLOP, tensors and attention."""
