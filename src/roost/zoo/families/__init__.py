"""Families of random models, one file each, to learn on one part and try on another."""
