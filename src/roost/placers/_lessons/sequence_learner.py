"""What `seq2seq` and `spotlight` share: the network, and the loop that draws placements, tries them
and learns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np

from roost.core.arrays import Array
from roost.errors import InputError
from roost.learners.hardware import check_name
from roost.learners.threads import one_thread
from roost.placers._lessons.lesson import FAR, Lesson, Outcomes
from roost.placers._shared.setting_checks import check_choice, check_number, check_whole

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from roost.policies.seq2seq import Seq2Seq


@dataclass(frozen=True)
class Network:
    """Settings of the policy; `policies/seq2seq.py` says what they mean."""

    hidden: int = 64
    attention: str = "none"  # dot, additive
    autoregressive: bool = True
    aligned: bool = True
    temperature: float = 1.0
    tanh: float = 0.0
    spread: float = 0.0
    # How much of the logarithm of a device's slowness is taken off its logit.
    speed_prior: float = 1.0
    # What the logit of the best heuristic's device gets; above 0, that is tried first.
    heuristic_prior: float = 0.0
    heuristic_first: bool = False  # it is tried first without such a prior too
    twins: bool = True  # tell devices that are alike apart by the order of their first use
    train_on: str = "auto"  # a GPU where there is one; cpu, cuda, cuda:N

    def __post_init__(self) -> None:
        check_whole(self, 1, "hidden")
        check_choice(self, "attention", ("none", "dot", "additive"))
        for name in ("autoregressive", "aligned", "twins", "heuristic_first"):
            check_choice(self, name, (True, False))
        check_number(self, 1 / FAR, FAR, "temperature")
        check_number(self, 0.0, FAR, "tanh", "spread", "speed_prior", "heuristic_prior")
        check_name(self.train_on)

    def build(self, lesson: Lesson, generator: torch.Generator) -> Seq2Seq:
        import torch

        from roost.learners.hardware import torch_device
        from roost.policies.features import group_features, speed_prior
        from roost.policies.seq2seq import Seq2Seq

        problem, groups = lesson.problem, lesson.groups
        features = torch.from_numpy(group_features(problem, groups.unit))
        prior = self.speed_prior * speed_prior(problem, groups.unit)
        if self.heuristic_prior > 0 or self.heuristic_first:
            prior[np.arange(len(prior)), lesson.heuristic()] += self.heuristic_prior
        twins = lesson.twins if self.twins else [-1] * problem.cluster.num_devices
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(int(torch.randint(2**62, (1,), generator=generator)))
            policy = Seq2Seq(
                features, torch.from_numpy(groups.allowed), torch.from_numpy(prior), twins,
                self.hidden, self.attention,
                self.autoregressive, self.aligned, self.temperature, self.tanh, self.spread,
            )  # fmt: skip
        return policy.to(torch_device(self.train_on))


def check_network(network: Network) -> None:
    if not isinstance(network, Network):
        raise InputError(f"network is a {type(network).__name__}; it must be a Network")


class Learner(Protocol):
    """What `learners/` has."""

    def state(self) -> dict[str, Array]: ...

    def take_up(self, state: Mapping[str, Array]) -> None: ...


L = TypeVar("L", bound=Learner)


def learn(
    lesson: Lesson,
    network: Network,
    batch: int,
    begin: Callable[[Seq2Seq], L],
    teach: Callable[[L, Tensor, Tensor, Outcomes], dict[str, float]],
) -> None:
    """Draw batches of placements and teach the learner what they cost, until the lesson's share of
    the budget is spent.

    A policy that only repeats itself is forgotten, and another one begun.
    """
    import torch

    evaluate = lesson.evaluate
    generator = torch.Generator().manual_seed(int(evaluate.rng.integers(2**62)))
    with one_thread():
        policy = network.build(lesson, generator)
        learner = begin(policy)
        if (kept := evaluate.kept()) is not None:
            learner.take_up(kept)
            lesson.take_up(kept)
            generator.set_state(torch.from_numpy(np.array(kept["generator"])))
        while lesson.left > 0:
            actions, log_probs = policy.sample(batch, generator)
            found = lesson.outcomes(actions.cpu().numpy())
            told = teach(learner, actions, log_probs, found)
            assert evaluate.best is not None
            evaluate.note(told | found.figures() | {"best": evaluate.best.step_time})
            if lesson.is_stale():
                policy = network.build(lesson, generator)
                learner = begin(policy)
            evaluate.keep(partial(_state, learner, lesson, generator))


def _state(learner: Learner, lesson: Lesson, generator: torch.Generator) -> dict[str, Array]:
    return learner.state() | lesson.state() | {"generator": generator.get_state().numpy()}
