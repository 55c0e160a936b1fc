"""`roost/Placement-v0`: one episode of placing the groups of a problem."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from os import PathLike
from typing import Any, ClassVar

import gymnasium
import numpy as np

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.graph import Graph
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.environments._episodes import Episodes
from roost.environments._settings import Settings, problems_of
from roost.environments._table import table
from roost.errors import InputError

Observation = dict[str, Any]


class PlacementEnvironment(gymnasium.Env[Observation, Any]):
    """A placement, made group by group or changed move by move; the action is the device of the
    current group.

    Give a problem, or problems of which each reset draws one, or a graph and a cluster, as objects,
    names or paths. The other keywords are the fields of `_settings.Settings`. `reset` takes the
    options `problem`, the number of the one to play, and `placement`, to start from when moving.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi"], "render_fps": 4}  # type: ignore[misc]

    def __init__(
        self,
        problem: Problem | str | PathLike[str] | None = None,
        *,
        problems: Sequence[Problem | str | PathLike[str]] | None = None,
        graph: Graph | str | PathLike[str] | None = None,
        cluster: Cluster | str | PathLike[str] | None = None,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        check_render_mode(render_mode)
        self.render_mode = render_mode
        self._episode = Episodes(
            problems_of(problem, problems, graph, cluster), Settings.of(settings), 1
        )
        self.observation_space = self._episode.space
        self.action_space = gymnasium.spaces.Discrete(self._episode.sizes.devices)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """A new episode; the same seed gives the same ones from here on."""
        super().reset(seed=checked_seed(seed))
        self._episode.begin([0], [self.np_random], options)
        return self._observed()

    def step(self, action: Any) -> tuple[Observation, float, bool, bool, dict[str, Any]]:
        """Put the current group on a device."""
        episode = self._episode
        if episode.step[0] < 0:
            raise InputError("the environment was not reset; call reset before the first step")
        if episode.ended[0]:
            raise InputError("the episode has ended; call reset for the next one")
        reward = episode.act(np.zeros(1, np.int64), np.array([self._device(action)]))
        observation, info = self._observed()
        return observation, float(reward[0]), bool(episode.ended[0]), False, info

    def _device(self, action: Any) -> int:
        count = self._episode.sizes.devices
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
        found: Observation = {key: array[0] for key, array in self._episode.observe().items()}
        info = {"problem": int(self._episode.case[0]), "action_mask": found["action_mask"].copy()}
        return found, info | self._episode.outcome(0)

    def action_masks(self) -> Array:  # [devices] bool
        """Where the current group may go, under the name by which MaskablePPO of sb3-contrib asks
        for it."""
        return np.asarray(self._episode.allowed[0] > 0)

    @property
    def problem(self) -> Problem:
        """The problem of this episode."""
        return self._episode.case_of(0).problem

    @property
    def placement(self) -> Placement | None:
        """The placement as it is now, or None while groups are missing."""
        return self._episode.placement(0) if self._episode.complete(0) else None

    def render(self) -> str | None:
        """A table of the devices, where render_mode is "ansi"."""
        return table(self._episode, 0) if self.render_mode == "ansi" else None


def check_render_mode(mode: str | None) -> None:
    if mode not in (None, "ansi"):
        raise InputError(f"render_mode {mode!r} must be 'ansi', or left out")


def checked_seed(seed: Any) -> Any:
    if seed is None or (
        isinstance(seed, int | np.integer) and not isinstance(seed, bool) and seed >= 0
    ):
        return None if seed is None else int(seed)
    raise InputError(f"seed is {seed!r}; it must be a whole number, not negative")
