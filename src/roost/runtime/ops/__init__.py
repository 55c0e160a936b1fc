"""The graph runtime: a captured step, run op by op on the devices of its placement."""
