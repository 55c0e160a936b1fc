"""Problem -> device logits: the networks of the learned placers, and the features they see."""
