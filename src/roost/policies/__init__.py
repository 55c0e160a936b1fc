"""Policies: networks from features of a problem to logits of devices, and those features."""
