"""The rules of the environment, for episodes side by side, each on a problem of its own.

Group by group (Mirhoseini et al. 2017): groups are placed one after the other on an empty cluster,
and the last one brings the reward, minus the cost of the placement. Move by move (Placeto, Addanki
et al. 2019): a complete placement is given, each group in turn may move, and every move is rewarded
by what it takes off the cost.

The cost is the square root of the step time over that of the best single device. What does not fit
costs `memory_penalty` more, and as much again times the share of all bytes held that has no room.
Differs in: step times are relative, so that rewards of unlike problems are alike; Placeto's reward
has no root.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from roost.core.arrays import Array
from roost.core.placement import Placement
from roost.core.problem import Problem
from roost.environments._grouped_problem import GroupedProblem, beside
from roost.environments._observation import Sizes, fixed_parts, padded, space_of
from roost.environments._settings import MOVE_BY_MOVE, EnvironmentSettings
from roost.errors import InputError
from roost.placers.toolkit import GroupEpisodes, fastest_allowed

_OPTIONS = ("problem", "placement")


class EnvironmentEpisodes(GroupEpisodes):
    """Episodes with costs, rewards and observations. Rows are episodes; each row is at its own step
    of its own problem."""

    def __init__(
        self, problems: Sequence[Problem], settings: EnvironmentSettings, count: int
    ) -> None:
        self.settings = settings
        self.by_moves = settings.mode == MOVE_BY_MOVE
        self.problems = [
            GroupedProblem.of(problem, settings.groups, settings.order) for problem in problems
        ]
        self.sizes = sizes = Sizes.of(self.problems, settings, count)
        self.space = space_of(sizes)
        self._fixed = fixed_parts(self.problems, self.space)
        # Figures of the problems, padded: [problems, ...].
        every = self.problems
        shape = (sizes.groups, sizes.devices)
        memory = [each.problem.cluster.memory for each in every]
        self._allowed = padded([each.units.allowed for each in every], shape, np.int8)
        self._time = padded([each.units.time for each in every], shape, float)
        self._fastest = padded([each.fastest for each in every], shape[:1], int)
        self._bytes = padded([each.held_bytes for each in every], shape[:1], float)
        self._memory = padded(memory, shape[1:], float)
        self._reference = np.array([each.reference for each in every])

        self.make_room(count, sizes.groups)
        self.number = np.zeros(count, np.int64)  # [episodes] index in problems
        # Of the placement, once it was simulated.
        self._cost = np.zeros(count)  # [episodes]
        self.step_time = np.zeros(count)  # [episodes] seconds
        self.missing = np.zeros(count, np.int64)  # [episodes] bytes
        # Of the groups that are on a device.
        self._placed = np.zeros((count, *shape), np.int8)  # [episodes, groups, devices]
        self._busy = np.zeros((count, sizes.devices))  # [episodes, devices] seconds
        self._held = np.zeros((count, sizes.devices))  # [episodes, devices] bytes

    @property
    def allowed(self) -> Array:  # [episodes, devices] 1 where the current group may go
        return np.asarray(self._allowed[self.number, self.current])

    def begin(
        self,
        rows: Sequence[int],
        rngs: Sequence[np.random.Generator],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin new episodes in these rows, drawn with a generator each."""
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            kind = type(options).__name__
            raise InputError(f"options is a {kind}; it must be a table such as {{'problem': 0}}")
        for key in options:
            if key not in _OPTIONS:
                raise InputError(f"reset has no option {key!r}; known: {', '.join(_OPTIONS)}")
        for row, rng in zip(rows, rngs, strict=True):
            number = self._pick(rng, options.get("problem"))
            grouped = self.problems[number]
            device = self._first_devices(grouped, rng, options.get("placement"))
            sweeps = self.settings.sweeps if self.by_moves else 1
            groups = np.arange(grouped.num_groups)
            self.start(row, self.NOWHERE if device is None else device, groups, sweeps)
            self.number[row] = number
            for figures in (self._cost, self._placed, self._busy, self._held):
                figures[row] = 0
            if device is not None:
                seconds = self._time[number, groups, device]
                self._placed[row, groups, device] = 1
                np.add.at(self._busy[row], device, seconds)
                np.add.at(self._held[row], device, self._bytes[number, groups])
        if self.by_moves:
            self._simulate(np.asarray(rows))

    def _pick(self, rng: np.random.Generator, wanted: Any) -> int:
        count = len(self.problems)
        if wanted is None:
            return int(rng.integers(count)) if count > 1 else 0
        is_whole = isinstance(wanted, int | np.integer) and not isinstance(wanted, bool)
        if not is_whole or not 0 <= wanted < count:
            raise InputError(f"option problem is {wanted!r}; problems are 0 to {count - 1}")
        return int(wanted)

    def _first_devices(
        self, grouped: GroupedProblem, rng: np.random.Generator, wanted: Any
    ) -> Array | None:  # [groups]
        """The devices that an episode begins with; None if groups are placed one by one."""
        units = grouped.units
        if wanted is not None and not self.by_moves:
            raise InputError(
                "option placement is for mode 'move_by_move'; group by group starts from nothing"
            )
        if wanted is not None:
            device = grouped.problem.check(wanted).device
            return fastest_allowed(units, units.unit_devices(device))
        if not self.by_moves:
            return None
        if self.settings.start == "single":
            return grouped.single
        chance = np.where(units.allowed, rng.random(units.allowed.shape), -1.0)
        return np.asarray(chance.argmax(axis=1))

    def act(self, rows: Array, action: Array) -> Array:  # [rows] rewards
        """Put the current group of each row on a device. A device that it may not use is replaced
        by its fastest, at a penalty."""
        number = self.number[rows]
        group = self.current[rows]
        may = self._allowed[number, group, action] > 0
        device = np.where(may, action, self._fastest[number, group])
        before = self.put(rows, device)
        changed = before != device
        for there, sign in ((before, -1), (device, 1)):
            moved = changed & (there != self.NOWHERE)
            row = rows[moved]
            one = group[moved]
            on = there[moved]
            self._placed[row, one, on] = sign > 0
            self._busy[row, on] += sign * self._time[number[moved], one, on]
            self._held[row, on] += sign * self._bytes[number[moved], one]
        reward = np.where(may, 0.0, -self.settings.forbidden_penalty)
        cost_before = self._cost[rows]  # 0 until the placement is complete
        judged = changed if self.by_moves else self.ended[rows]
        if judged.any():
            self._simulate(rows[judged])
        return np.asarray(reward + cost_before - self._cost[rows])

    def _simulate(self, rows: Array) -> None:
        """The cost of the placements in these rows, all those of one problem at once."""
        numbers = self.number[rows]
        for number in np.unique(numbers).tolist():
            here = rows[numbers == number]
            outcomes = self.problems[number].simulate(self.device[here])
            missing = outcomes.missing_bytes
            share = missing / np.maximum(outcomes.peak_memory.sum(axis=1), 1)
            penalty = self.settings.memory_penalty * (1.0 + share)
            cost = np.sqrt(outcomes.step_time / self._reference[number])
            self._cost[here] = cost + np.where(missing > 0, penalty, 0.0)
            self.step_time[here] = outcomes.step_time
            self.missing[here] = missing

    def observe(self) -> dict[str, Array]:
        """The observation of each row: [episodes, ...] each, and new each time."""
        number = self.number
        observation = {key: array[number] for key, array in self._fixed.items()}
        # Sums of what came and went round: a device that is empty again may be a hair below zero.
        busy = np.maximum(self._busy, 0.0)
        held = np.maximum(self._held, 0.0)
        observation["devices"][..., -2] = beside(busy, self._reference[number][:, None])
        observation["devices"][..., -1] = beside(held, self._memory[number])
        return observation | {
            "placement": self._placed.copy(),
            "visited": self.visited.astype(np.int8),
            "current_group": self.current,
            "progress": (self.step / self.length)[:, None].astype(np.float32),
            "action_mask": self.allowed,
        }

    def info(self, row: int, action_mask: Array) -> dict[str, Any]:
        """The info of a row, with a copy of its mask."""
        number = int(self.number[row])
        return {"problem": number, "action_mask": action_mask.copy(), **self.outcome(row)}

    def outcome(self, row: int) -> dict[str, Any]:
        """The figures of a row that were simulated; at the end, also its placement."""
        ended = bool(self.ended[row])
        outcome: dict[str, Any] = {}
        if ended or self.by_moves:
            outcome["step_time"] = float(self.step_time[row])
            outcome["feasible"] = bool(self.missing[row] == 0)
            outcome["missing_bytes"] = int(self.missing[row])
        if ended:
            outcome["placement"] = self.placement(row)
        return outcome

    def placement(self, row: int) -> Placement | None:
        """The placement of a row, or None while groups have no device."""
        grouped = self.grouped(row)
        device = self.device[row, : grouped.num_groups]
        return None if (device == self.NOWHERE).any() else grouped.placement(device)

    def grouped(self, row: int) -> GroupedProblem:
        """The problem of a row."""
        return self.problems[int(self.number[row])]
