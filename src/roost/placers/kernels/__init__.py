"""Loops of the placers, compiled."""
