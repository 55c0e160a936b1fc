"""Learners: they update a policy from the rewards of its actions. One file holds one algorithm.

No learner knows about placements.
"""
