"""Imports that every child of `capture_coverage.py` needs: done once, before the children fork."""

import importlib

import coverage_models

coverage_models.declare_torchvision_ops()
for name in (
    "torchvision",
    "timm",
    "transformers",
    "diffusers",
    "roost.frontends.torch",
    "roost.frontends.tracing.trace",
):
    importlib.import_module(name)
