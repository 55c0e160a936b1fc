"""From a model to a plan in one call, and the plan, applied to the model."""

from roost.plan import files as files  # registers the format of plan.json
from roost.plan.placing import kv_bytes, place
from roost.plan.plan import Plan

__all__ = ["Plan", "kv_bytes", "place"]
