"""Policy x rewards -> a better policy. One file, one algorithm; none of them knows what a placement
is."""
