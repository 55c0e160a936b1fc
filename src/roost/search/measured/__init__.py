"""Searches that run placements: the worker process that runs them, and the race at the end."""

from roost.search.measured.measuring import Measuring as Measuring
