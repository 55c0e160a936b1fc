"""Many episodes at once: `roost/Placement-v0` as a vector environment of its own.

All placements of one problem are simulated in one call of the compiled simulator, and observations
are made for all episodes together. Step for step it equals Gymnasium's SyncVectorEnv of plain
environments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from roost.core.arrays import Array
from roost.core.cluster import Cluster
from roost.core.graph import Graph
from roost.core.problem import Problem
from roost.environments._episodes import EnvironmentEpisodes
from roost.environments._settings import EnvironmentSettings, Named, problems_of
from roost.environments._text import text_of
from roost.environments.placement import (
    NOT_RESET,
    Observation,
    PlacementEnvironment,
    check_render_mode,
    checked_seed,
)
from roost.errors import InputError
from roost.placers.toolkit import check_whole

_MODES = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)


class VectorEnvironment(VectorEnv[Observation, Array, Array]):
    """`num_envs` episodes at once, each on a problem of its own; keywords as those of the plain
    environment.

    An episode that ended is followed by a new one: at the next step, whose action is ignored. With
    `autoreset_mode` SAME_STEP it is followed at once; `final_obs` and `final_info` then hold its
    end.
    """

    def __init__(
        self,
        num_envs: int = 1,
        problem: Problem | Named | None = None,
        *,
        problems: Sequence[Problem | Named] | None = None,
        graph: Graph | Named | None = None,
        cluster: Cluster | Named | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        render_mode: str | None = None,
        **settings: Any,
    ) -> None:
        self.num_envs = num_envs
        check_whole(self, 1, "num_envs")
        if autoreset_mode not in (*_MODES, *(mode.value for mode in _MODES)):
            known = " and ".join(mode.value for mode in _MODES)
            raise InputError(f"autoreset_mode is {autoreset_mode!r}; known are {known}")
        check_render_mode(render_mode)
        self.render_mode = render_mode
        autoreset_mode = AutoresetMode(autoreset_mode)
        self._resets_at_once = autoreset_mode == AutoresetMode.SAME_STEP
        self.metadata = {**PlacementEnvironment.metadata, "autoreset_mode": autoreset_mode}
        given = problems_of(problem, problems, graph, cluster)
        self._episodes = EnvironmentEpisodes(given, EnvironmentSettings.of(settings), num_envs)
        self.single_observation_space = self._episodes.space
        self.single_action_space = gymnasium.spaces.Discrete(self._episodes.sizes.devices)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._rngs: list[np.random.Generator] = []

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Observation, dict[str, Any]]:
        """Begin new episodes everywhere. A seed is that of the first; the next get seed + 1, and so
        on."""
        self._seed(seed)
        self._episodes.begin(range(self.num_envs), self._rngs, options)
        observation = self._episodes.observe()
        return observation, self._info(observation, {})

    def _seed(self, seed: int | Sequence[int | None] | None) -> None:
        if isinstance(seed, list | tuple):
            seeds = [checked_seed(one) for one in seed]
            if len(seeds) != self.num_envs:
                raise InputError(f"seed has {len(seeds)} entries for {self.num_envs} environments")
        else:
            first = checked_seed(seed)
            seeds = [None if first is None else first + row for row in range(self.num_envs)]
        kept = self._rngs or [seeding.np_random()[0] for _ in seeds]
        self._rngs = [
            rng if one is None else seeding.np_random(one)[0]
            for rng, one in zip(kept, seeds, strict=True)
        ]

    def step(self, actions: Any) -> tuple[Observation, Array, Array, Array, dict[str, Any]]:
        """Put the current group of each episode on a device."""
        episodes = self._episodes
        if (episodes.step < 0).any():
            raise InputError(NOT_RESET)
        actions = self._checked(actions)
        had_ended = episodes.ended
        playing = np.flatnonzero(~had_ended)
        rewards = np.zeros(self.num_envs)
        rewards[playing] = episodes.act(playing, actions[playing])
        self._begin(np.flatnonzero(had_ended))
        terminations = episodes.ended
        ended = np.flatnonzero(terminations)
        infos: dict[str, Any] = {}
        if self._resets_at_once and len(ended):
            infos = self._final(ended)
            self._begin(ended)
        observation = episodes.observe()
        truncations = np.zeros(self.num_envs, np.bool_)
        return observation, rewards, terminations, truncations, self._info(observation, infos)

    def _begin(self, rows: Array) -> None:
        if len(rows):
            self._episodes.begin(rows.tolist(), [self._rngs[row] for row in rows.tolist()])

    def _checked(self, actions: Any) -> Array:
        wanted = f"actions must be {self.num_envs} devices, whole numbers, not"
        try:
            devices = np.asarray(actions)
        except ValueError:  # rows of unequal length
            raise InputError(f"{wanted} {actions!r}") from None
        if devices.shape != (self.num_envs,) or devices.dtype.kind not in "iu":
            raise InputError(f"{wanted} {devices.dtype} {list(devices.shape)}")
        count = self._episodes.sizes.devices
        wrong = np.flatnonzero((devices < 0) | (devices >= count))
        if len(wrong):
            first = wrong[0]
            raise InputError(
                f"action {first} is device {devices[first]}; devices are 0 to {count - 1}"
            )
        return devices.astype(np.int64)

    def _final(self, ended: Array) -> dict[str, Any]:
        """The last observation and info of the episodes that ended."""
        observation = self._episodes.observe()
        infos: dict[str, Any] = {}
        for row in ended.tolist():
            last = {key: array[row].copy() for key, array in observation.items()}
            info = self._episodes.info(row, last["action_mask"])
            infos = self._add_info(infos, {"final_obs": last, "final_info": info}, row)
        return infos

    def _info(self, observation: Observation, infos: dict[str, Any]) -> dict[str, Any]:
        """The infos as Gymnasium gathers them: an array for each key, and one more that says which
        episodes have it."""
        episodes = self._episodes
        columns: dict[str, Array] = {
            "problem": episodes.number.copy(),
            "action_mask": observation["action_mask"].copy(),
        }
        if episodes.by_moves:
            columns["step_time"] = episodes.step_time.copy()
            columns["missing_bytes"] = episodes.missing.copy()
            columns["feasible"] = episodes.missing == 0
        for key, column in columns.items():
            infos[key] = column
            infos[f"_{key}"] = np.ones(self.num_envs, np.bool_)
        for row in np.flatnonzero(episodes.ended).tolist():
            infos = self._add_info(infos, episodes.outcome(row), row)
        return infos

    def render(self) -> tuple[str, ...] | None:
        """A table for each episode, if render_mode is "ansi"."""
        if self.render_mode != "ansi":
            return None
        return tuple(text_of(self._episodes, row) for row in range(self.num_envs))
