"""Compiled loops of the bounds."""
