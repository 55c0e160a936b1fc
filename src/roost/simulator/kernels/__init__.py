"""Compiled loops. Flat arrays, unsigned indices, no bounds to check: C written in Python, so that
LLVM sees C."""
