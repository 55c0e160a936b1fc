"""From a model to a plan in one call, and the plan, applied to the model."""

from roost.plan.placing import kv_bytes, place
from roost.plan.plan import Plan

__all__ = ["Plan", "kv_bytes", "place"]
