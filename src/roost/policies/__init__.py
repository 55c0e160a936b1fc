"""Networks that score devices, and the files that hold their weights."""
