"""Policy x what it did -> a better policy: one file, one update rule."""
