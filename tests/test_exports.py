"""The public names, exactly."""

import subprocess
import sys

import pytest

import roost

NAMES = """
    Bound Cluster Costs Device Graph GraphBuilder Infeasible InputError Link Placement Plan Problem Result RoostError
    Simulator Timeline Trainer Trial bound capture cluster estimate load place probe profile simulate solve trainer
    zoo
"""


def test_public_names_are_these():
    assert roost.__all__ == NAMES.split()


def test_every_public_name_can_be_had():
    for name in roost.__all__:
        assert getattr(roost, name) is not None
    assert set(roost._HOME) | {"zoo"} == set(roost.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = roost.nonsense


def test_importing_roost_imports_nothing_heavy():
    heavy = "numba torch msgspec numpy"
    code = f"import sys, roost; print([m for m in '{heavy}'.split() if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
