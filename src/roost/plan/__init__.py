"""From a model to a plan or a trainer in one call, and the plan, applied to the model."""

from roost.plan import files as files  # registers the format of plan.json
from roost.plan.placing import kv_bytes, place
from roost.plan.plan import Plan
from roost.plan.start_training import trainer
from roost.plan.training import Trainer

__all__ = ["Plan", "Trainer", "kv_bytes", "place", "trainer"]
