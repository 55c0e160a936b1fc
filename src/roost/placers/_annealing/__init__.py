"""The compiled search: annealing chains, their moves, and the way downhill."""
