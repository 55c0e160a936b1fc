"""Contract suites for authors of plug-ins: one check for each kind of plug-in.

>>> from roost.testing import check_placer
>>> check_placer("roost.placers.single:Single", ["chain"])
"""

from roost.testing.placers import check_placer
from roost.testing.plugins import (
    check_cost_model,
    check_exporter,
    check_frontend,
    check_preset,
    check_transform,
)

__all__ = [
    "check_cost_model",
    "check_exporter",
    "check_frontend",
    "check_placer",
    "check_preset",
    "check_transform",
]
