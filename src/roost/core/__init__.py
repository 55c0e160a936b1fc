"""The nouns, frozen: graph, cluster, costs, problem, placement, trial, result and timeline.

All other folders pass these to each other.
"""
