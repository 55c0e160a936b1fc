"""Starts of searches: placements of other placers, and parameters that live elsewhere."""
