"""Graph x Placement -> the running model."""
