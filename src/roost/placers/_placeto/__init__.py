"""Placeto: episodes, features, the learner, and training over many problems."""
