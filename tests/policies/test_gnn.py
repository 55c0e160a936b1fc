"""The network of Placeto: nothing depends on how groups and devices are numbered."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from roost.policies.gnn import GraphMaps, GraphPolicy, GraphPolicyShape, pools

GROUPS, DEVICES, BATCH = 7, 4, 3
SOURCE, TARGET = np.array([0, 0, 1, 2, 3, 4]), np.array([1, 2, 3, 3, 4, 5])  # group 6 is by itself


def reach_of(source: np.ndarray, target: np.ndarray) -> np.ndarray:
    step = np.zeros((GROUPS, GROUPS), dtype=bool)
    step[source, target] = True
    reach = step.copy()
    for _ in range(GROUPS):
        reach |= (reach.astype(int) @ step.astype(int)) > 0
    return reach


def policy_of(**parts: bool) -> GraphPolicy:
    policy = GraphPolicy(GraphPolicyShape(5, 6, width=4, hidden=8, rounds=3, **parts), seed=1)
    with torch.no_grad():  # or every device is as likely
        policy.score.weight.normal_(generator=torch.Generator().manual_seed(2))
    return policy


def log_probs(policy: GraphPolicy, source: np.ndarray, target: np.ndarray, groups: torch.Tensor, at: torch.Tensor,
              devices: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:  # fmt: skip
    maps = GraphMaps.of(reach_of(source, target), source, target)
    context = policy.contexts_at(maps, policy.embed(maps, groups), at)
    return policy.log_probs(context[..., None], devices, allowed).detach()


@pytest.fixture
def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    groups = torch.randn(5, BATCH, GROUPS, generator=generator)
    devices = torch.randn(6, BATCH, DEVICES, generator=generator)
    allowed = torch.tensor([[True] * 4, [True, False, True, True], [False, True, True, False]])
    return groups, torch.tensor([3, 0, 6]), devices, allowed


def test_devices_in_another_order_have_their_probabilities_in_that_order(given) -> None:
    groups, at, devices, allowed = given
    order = torch.tensor([2, 0, 3, 1])
    plain = log_probs(policy_of(), SOURCE, TARGET, groups, at, devices, allowed)
    turned = log_probs(
        policy_of(), SOURCE, TARGET, groups, at, devices[..., order], allowed[:, order]
    )
    torch.testing.assert_close(turned, plain[:, order])
    assert plain[0].std() > 1e-3  # or any order would do


def test_groups_with_other_numbers_have_the_same_probabilities(given) -> None:
    groups, at, devices, allowed = given
    new = np.array([4, 2, 6, 0, 5, 1, 3])  # number of each group
    moved = torch.empty_like(groups)
    moved[..., torch.from_numpy(new)] = groups
    plain = log_probs(policy_of(), SOURCE, TARGET, groups, at, devices, allowed)
    again = log_probs(
        policy_of(), new[SOURCE], new[TARGET], moved, torch.from_numpy(new)[at], devices, allowed
    )
    torch.testing.assert_close(again, plain)
    elsewhere = log_probs(policy_of(), new[SOURCE], new[TARGET], groups, at, devices, allowed)
    assert not torch.allclose(elsewhere[0], plain[0])


def test_a_device_that_is_not_allowed_changes_nothing(given) -> None:
    groups, at, devices, allowed = given
    plain = log_probs(policy_of(), SOURCE, TARGET, groups, at, devices, allowed)
    fewer = log_probs(policy_of(), SOURCE, TARGET, groups, at, devices[..., 1:3], allowed[:, 1:3])
    torch.testing.assert_close(fewer[2], plain[2, 1:3])
    assert torch.isinf(plain[2, 0])


def test_all_contexts_at_once_are_those_of_each_group(given) -> None:
    groups, at, _, _ = given
    policy, maps = policy_of(), GraphMaps.of(reach_of(SOURCE, TARGET), SOURCE, TARGET)
    embedded = policy.embed(maps, groups)
    torch.testing.assert_close(
        policy.contexts_at(maps, embedded, at),
        policy.contexts(maps, embedded)[:, torch.arange(BATCH), at],
    )


@pytest.mark.parametrize(("part", "far"), [("messages", 5), ("pools", 5)])
def test_without_a_part_a_group_far_away_is_still_heard_by_the_other(
    part: str, far: int, given
) -> None:
    groups, _, devices, allowed = given
    changed = groups.clone()
    changed[..., far] += 1.0
    at = torch.tensor([0, 0, 0])
    for parts, heard in (
        ({}, True),
        ({"messages": False, "pools": False}, False),
        ({part: False}, part == "messages"),
    ):
        policy = policy_of(**parts)
        both = [
            log_probs(policy, SOURCE, TARGET, g, at, devices, allowed) for g in (groups, changed)
        ]
        # Three rounds of messages come no further than three edges: group 5 is four from group 0.
        assert torch.equal(*both) != heard, parts


def test_a_new_policy_finds_every_device_as_likely(given) -> None:
    groups, at, devices, allowed = given
    policy = GraphPolicy(GraphPolicyShape(5, 6, width=4, hidden=8), seed=1)
    probabilities = log_probs(policy, SOURCE, TARGET, groups, at, devices, allowed).exp()
    torch.testing.assert_close(probabilities, allowed / allowed.sum(dim=1, keepdim=True))


def test_pools_are_ancestors_descendants_and_the_rest() -> None:
    means = pools(reach_of(SOURCE, TARGET))
    assert np.flatnonzero(means[0, 3]).tolist() == [0, 1, 2]
    assert np.flatnonzero(means[1, 3]).tolist() == [4, 5]
    assert np.flatnonzero(means[2, 3]).tolist() == [6]
    assert means[0, 3].sum() == pytest.approx(1.0)
