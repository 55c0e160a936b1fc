"""`roost/Placement-v0`: one episode at a time of placing the groups of a problem."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, ClassVar

import gymnasium
import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.environments._episodes import EnvironmentEpisodes
from roost.environments._settings import EnvironmentSettings, Named, problems_of
from roost.environments._text import text_of
from roost.errors import InputError

Observation = dict[str, Any]
NOT_RESET = "the environment was not reset; call reset before the first step"


class PlacementEnvironment(gymnasium.Env[Observation, Any]):
    """A placement, made group by group or changed move by move; the action is the device of the
    current group.

    Give a problem, or problems of which each reset draws one, or a graph and a cluster, as objects,
    names or paths. The other keywords are the fields of `EnvironmentSettings`. `reset` takes the
    options `problem`, the number of the problem to use, and `placement`, to start moves from.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]

    def __init__(
        self,
        problem: Problem | Named | None = None,
        *,
        problems: Sequence[Problem | Named] | None = None,
        graph: Graph | Named | None = None,
        cluster: Cluster | Named | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        check_render_mode(render_mode)
        self.render_mode = render_mode
        given = problems_of(problem, problems, graph, cluster)
        self._episodes = EnvironmentEpisodes(given, EnvironmentSettings.of(settings), 1)
        self.observation_space = self._episodes.space
        self.action_space = gymnasium.spaces.Discrete(self._episodes.sizes.devices)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new episode; the same seed gives the same ones from here on."""
        super().reset(seed=checked_seed(seed))
        self._episodes.begin([0], [self.np_random], options)
        return self._observed()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Put the current group on a device."""
        episodes = self._episodes
        if episodes.step[0] < 0:
            raise InputError(NOT_RESET)
        if episodes.ended[0]:
            raise InputError("the episode has ended; call reset for the next one")
        reward = episodes.act(np.zeros(1, np.int64), np.array([self._device(action)]))
        observation, info = self._observed()
        return observation, float(reward[0]), bool(episodes.ended[0]), False, info

    def _device(self, action: Any) -> int:
        count = self._episodes.sizes.devices
        try:
            device = operator.index(action)
        except TypeError:
            raise InputError(
                f"the action is {action!r}; it must be a device, a whole number"
            ) from None
        if not 0 <= device < count:
            raise InputError(f"the action is device {device}; devices are 0 to {count - 1}")
        return device

    def _observed(self) -> tuple[Observation, dict[str, Any]]:
        observation = {key: array[0] for key, array in self._episodes.observe().items()}
        return observation, self._episodes.info(0, observation["action_mask"])

    def action_masks(self) -> Array:  # [devices] bool
        """The devices where the current group may go, by the name that MaskablePPO calls."""
        return np.asarray(self._episodes.allowed[0] > 0)

    @property
    def problem(self) -> Problem:
        """The problem of this episode."""
        return self._episodes.grouped(0).problem

    @property
    def placement(self) -> Placement | None:
        """The placement as it is now, or None while groups have no device."""
        return self._episodes.placement(0)

    def render(self) -> str | None:
        """A table of the devices, if render_mode is "ansi"."""
        return text_of(self._episodes, 0) if self.render_mode == "ansi" else None


def check_render_mode(mode: str | None) -> None:
    if mode not in (None, "ansi"):
        raise InputError(f"render_mode {mode!r} must be 'ansi', or left out")


def checked_seed(seed: Any) -> Any:
    if seed is None:
        return None
    is_whole = isinstance(seed, int | np.integer) and not isinstance(seed, bool)
    if not is_whole or seed < 0:
        raise InputError(f"seed is {seed!r}; it must be a whole number, not negative")
    return int(seed)
