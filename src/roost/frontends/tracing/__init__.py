"""What the front-ends for PyTorch share: the trace of a step, FLOP, tensors and attention."""
