"""The graph runtime: runs a captured step op by op on the devices of its placement."""
