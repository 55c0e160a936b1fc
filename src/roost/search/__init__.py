"""Search for the best placement of a problem, by a placer, within a budget."""
