"""Output for people and other tools: one file per kind of output."""
