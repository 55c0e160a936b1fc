"""Ops timed on the devices of this machine."""
