"""The scores of `lister` are those of the devices that are allowed."""

from __future__ import annotations

import numpy as np
import torch

from roost.placers._lister.weights import NUM_FEATURES, new_tensors
from roost.policies.lister_network import Decisions, ListerPolicy


def policy() -> tuple[ListerPolicy, int]:
    """Drawn weights, and the number of features of a unit."""
    tensors = new_tensors(np.random.default_rng(0))
    weights = {name: value for name, value in tensors.items() if name not in ("ways", "rules")}
    generator = np.random.default_rng(1)
    loud = {name: generator.normal(0, 0.5, value.shape) for name, value in weights.items()}
    return ListerPolicy(loud), len(loud["known"])


def decisions(seen: torch.Tensor, known: torch.Tensor, mask: torch.Tensor) -> Decisions:
    rows = len(seen)
    return Decisions(
        seen=seen,
        known=known,
        mask=mask,
        choice=torch.zeros(rows, dtype=torch.int64),
        tilt=torch.zeros(rows, seen.shape[-1]),
        heat=torch.ones(rows),
        roll=torch.zeros(rows, dtype=torch.int64),
    )


def test_a_device_that_is_not_allowed_counts_nowhere() -> None:
    network, num_known = policy()
    generator = torch.Generator().manual_seed(0)
    seen = torch.randn(4, 3, NUM_FEATURES, generator=generator)
    known = torch.randn(4, num_known, generator=generator)
    two = network(decisions(seen[:, :2], known, torch.ones(4, 2, dtype=torch.bool)))
    closed = torch.tensor([[True, True, False]] * 4)
    three = network(decisions(seen, known, closed))
    torch.testing.assert_close(three[:, :2], two)
    assert (three[:, 2] < -1e8).all()
    assert (two.std(dim=0) > 0.01).all()  # the scores do depend on the features
