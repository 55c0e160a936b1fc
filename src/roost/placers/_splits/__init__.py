"""Contiguous splits and partitions."""
