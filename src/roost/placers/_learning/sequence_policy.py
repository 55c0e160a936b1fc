"""Settings of the network of `seq2seq` and `spotlight`, and the state that both keep."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from roost.bounds.alike import alike
from roost.core.arrays import Array, taken, wrong_array
from roost.core.problem import Problem
from roost.errors import InputError
from roost.learners.hardware import check_train_on
from roost.placers._learning.group_choices import FAR, GroupChoices
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole

if TYPE_CHECKING:
    import torch

    from roost.learners.ppo import Ppo
    from roost.learners.reinforce import Reinforce
    from roost.policies.seq2seq import Seq2Seq


@dataclass(frozen=True)
class SequenceNetwork:
    """Settings of the policy; `policies/seq2seq.py` explains them."""

    hidden: int = 64
    attention: str = "none"  # dot, additive
    autoregressive: bool = True
    aligned: bool = True
    temperature: float = 1.0
    tanh: float = 0.0
    spread: float = 0.0
    # The logit of a device starts lower by this times the logarithm of its slowness.
    speed_prior: float = 1.0
    # The logit of the best heuristic's device starts higher by this; above 0, it is tried first.
    heuristic_prior: float = 0.0
    heuristic_first: bool = False  # try the heuristics first, also without a prior
    twins: bool = True  # use exchangeable devices in a fixed order
    train_on: str = "auto"  # a GPU if there is one; or cpu, cuda, cuda:N

    def __post_init__(self) -> None:
        check_whole(self, 1, "hidden")
        check_choice(self, "attention", ("none", "dot", "additive"))
        for name in ("autoregressive", "aligned", "twins", "heuristic_first"):
            check_choice(self, name, (True, False))
        check_number(self, 1 / FAR, FAR, "temperature")
        check_number(self, 0.0, FAR, "tanh", "spread", "speed_prior", "heuristic_prior")
        check_train_on(self.train_on)

    def build(self, choices: GroupChoices, generator: torch.Generator) -> Seq2Seq:
        """A new policy for a problem, with weights drawn from the generator."""
        import torch

        from roost.learners.hardware import torch_device
        from roost.policies.features import group_features
        from roost.policies.seq2seq import Seq2Seq

        problem = choices.problem
        unit = choices.groups.unit
        prior = choices.prior(self, np.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            policy = Seq2Seq(
                torch.from_numpy(group_features(problem, unit)),
                torch.from_numpy(choices.groups.allowed),
                torch.from_numpy(prior),
                _twins(problem) if self.twins else [-1] * problem.cluster.num_devices,
                hidden=self.hidden,
                attention=self.attention,
                autoregressive=self.autoregressive,
                aligned=self.aligned,
                temperature=self.temperature,
                tanh=self.tanh,
                spread=self.spread,
            )
        return policy.to(torch_device(self.train_on))


def check_network(network: SequenceNetwork) -> None:
    """Raise InputError if a placer got something else as its network."""
    if not isinstance(network, SequenceNetwork):
        kind = type(network).__name__
        raise InputError(f"network is a {kind}; it must be a SequenceNetwork")


def search_state(
    learner: Ppo | Reinforce, choices: GroupChoices, generator: torch.Generator
) -> dict[str, Array]:
    """All arrays that a search needs to continue exactly where it was."""
    return learner.state() | choices.state() | {"generator": generator.get_state().numpy()}


def restore_search(
    learner: Ppo | Reinforce,
    choices: GroupChoices,
    generator: torch.Generator,
    state: Mapping[str, Array],
) -> None:
    """Continue from `search_state` of an earlier search."""
    import torch

    learner.restore(state)
    choices.restore(state)
    shape = tuple(generator.get_state().shape)
    chance = taken(state, "generator", shape, "u", most=255).astype(np.uint8)
    try:
        generator.set_state(torch.from_numpy(chance))
    except RuntimeError:
        raise wrong_array(state, "generator", "is not the state of a generator") from None


def _twins(problem: Problem) -> list[int]:
    """For each device, the exchangeable device that must be used before it, or -1."""
    twins = [-1] * problem.cluster.num_devices
    for members in alike(problem):
        for first, second in pairwise(members):
            twins[second] = first
    return twins
