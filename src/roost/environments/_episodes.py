"""The rules of the game, for any number of episodes side by side, each on a problem of its own.

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
from roost.environments._case import Case, beside
from roost.environments._observation import Sizes, lasting_parts, padded, space_of
from roost.environments._settings import MOVE_BY_MOVE, Settings
from roost.errors import InputError
from roost.placers.toolkit import fastest_allowed

_NOWHERE = -1
_OPTIONS = ("problem", "placement")


class Episodes:
    """So many episodes. Rows are episodes; every row is at its own step of its own problem."""

    def __init__(self, problems: Sequence[Problem], settings: Settings, count: int) -> None:
        self.settings = settings
        self.by_moves = settings.mode == MOVE_BY_MOVE
        self.cases = [Case.of(problem, settings.groups, settings.order) for problem in problems]
        self.sizes = sizes = Sizes.of(self.cases, settings, count)
        self.space = space_of(sizes)
        self._lasting = lasting_parts(self.cases, sizes)
        shape = (sizes.groups, sizes.devices)
        self._allowed = padded([case.units.allowed for case in self.cases], shape, np.int8)
        self._time = padded([case.units.time for case in self.cases], shape, np.float64)
        self._fastest = padded([case.fastest for case in self.cases], shape[:1], np.int64)
        self._bytes = padded([case.held_bytes for case in self.cases], shape[:1], np.float64)
        self._memory = padded(
            [case.problem.cluster.memory for case in self.cases], shape[1:], np.float64
        )
        self._reference = np.array([case.reference for case in self.cases])
        self._num_groups = np.array([case.num_groups for case in self.cases])

        self.case = np.zeros(count, np.int64)  # [episodes] index in cases
        self.step = np.full(count, _NOWHERE)  # [episodes] steps taken
        self.length = np.zeros(count, np.int64)  # [episodes] steps there are
        self.device = np.full((count, sizes.groups), _NOWHERE, np.int32)  # [episodes, groups]
        self._cost = np.zeros(count)  # [episodes] of the placement, once it was simulated
        self.step_time = np.zeros(count)  # [episodes] seconds, likewise
        self.missing = np.zeros(count, np.int64)  # [episodes] bytes, likewise
        self._placed = np.zeros((count, *shape), np.int8)
        self._visited = np.zeros((count, sizes.groups), np.int8)
        # [episodes, devices] seconds of the groups there.
        self._busy = np.zeros((count, sizes.devices))
        self._held = np.zeros((count, sizes.devices))  # [episodes, devices] bytes

    @property
    def current(self) -> Array:  # [episodes] the group whose turn it is; at the end the last one
        return np.asarray(np.minimum(self.step, self.length - 1) % self._num_groups[self.case])

    @property
    def allowed(self) -> Array:  # [episodes, devices] 1 where that group may go
        return np.asarray(self._allowed[self.case, self.current])

    @property
    def ended(self) -> Array:  # [episodes] bool
        return self.step >= self.length

    def begin(
        self,
        rows: Sequence[int],
        rngs: Sequence[np.random.Generator],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """New episodes in these rows, drawn with a generator each."""
        options = {} if options is None else options
        if not isinstance(options, Mapping):
            raise InputError(
                f"options is a {type(options).__name__}; it must be a table such as {{'problem': "
                f"0}}"
            )
        for key in options:
            if key not in _OPTIONS:
                raise InputError(f"reset has no option {key!r}; known: {', '.join(_OPTIONS)}")
        for row, rng in zip(rows, rngs, strict=True):
            number = self._pick(rng, options.get("problem"))
            start = self._start(self.cases[number], rng, options.get("placement"))
            self.case[row], self.step[row] = number, 0
            self.length[row] = self.cases[number].num_groups * (
                self.settings.sweeps if self.by_moves else 1
            )
            for array in (self._placed, self._visited, self._busy, self._held):
                array[row] = 0
            self.device[row] = _NOWHERE
            if start is not None:
                self._put_all(row, start)
        if self.by_moves:
            self._simulate(np.asarray(rows))

    def _pick(self, rng: np.random.Generator, wanted: Any) -> int:
        count = len(self.cases)
        if wanted is None:
            return int(rng.integers(count)) if count > 1 else 0
        if (
            isinstance(wanted, bool)
            or not isinstance(wanted, int | np.integer)
            or not 0 <= wanted < count
        ):
            raise InputError(f"option problem is {wanted!r}; problems are 0 to {count - 1}")
        return int(wanted)

    # [groups] devices.
    def _start(self, case: Case, rng: np.random.Generator, wanted: Any) -> Array | None:
        """The placement that an episode begins with; none where groups are placed one by one."""
        if wanted is not None:
            if not self.by_moves:
                raise InputError(
                    "option placement is for mode 'move_by_move'; group by group starts from "
                    "nothing"
                )
            return fastest_allowed(
                case.units, case.units.unit_devices(case.problem.check(wanted).device)
            )
        if not self.by_moves:
            return None
        if self.settings.start == "single":
            return case.single
        chance = np.where(case.units.allowed, rng.random(case.units.allowed.shape), -1.0)
        return np.asarray(chance.argmax(axis=1))

    def _put_all(self, row: int, start: Array) -> None:
        case, groups = self.case[row], np.arange(len(start))
        self.device[row, groups] = start
        self._placed[row, groups, start] = 1
        np.add.at(self._busy[row], start, self._time[case, groups, start])
        np.add.at(self._held[row], start, self._bytes[case, groups])

    def act(self, rows: Array, action: Array) -> Array:  # [rows] rewards
        """The current group of each row goes to a device; where it may not go there, to its
        fastest, at a penalty."""
        case, group = self.case[rows], self.current[rows]
        may = self._allowed[case, group, action] > 0
        device = np.where(may, action, self._fastest[case, group])
        reward = np.where(may, 0.0, -self.settings.forbidden_penalty)
        changed = self._put(rows, group, device)
        self._visited[rows, group] = 1
        self.step[rows] += 1
        if self.by_moves:
            before = self._cost[rows]
            self._simulate(rows[changed])
            return np.asarray(reward + before - self._cost[rows])
        last = self.ended[rows]
        if last.any():
            self._simulate(rows[last])
            reward[last] -= self._cost[rows[last]]
        return np.asarray(reward)

    # [rows] whether that changed anything.
    def _put(self, rows: Array, group: Array, device: Array) -> Array:
        before = self.device[rows, group]
        changed = before != device
        for there, sign in ((before, -1), (device, 1)):
            here = changed & (there != _NOWHERE)
            row, one, on = rows[here], group[here], there[here]
            self._placed[row, one, on] = sign > 0
            self._busy[row, on] += sign * self._time[self.case[row], one, on]
            self._held[row, on] += sign * self._bytes[self.case[row], one]
        self.device[rows, group] = device
        return np.asarray(changed)

    def _simulate(self, rows: Array) -> None:
        """The cost of the placements in these rows, all those of one problem at once."""
        case = self.case[rows]
        for number in np.unique(case).tolist():
            here = rows[case == number]
            found = self.cases[number].simulate(self.device[here])
            missing = found.missing_bytes
            share = missing / np.maximum(found.peak_memory.sum(axis=1), 1)
            cost = np.sqrt(found.step_time / self._reference[number])
            cost += np.where(missing > 0, self.settings.memory_penalty * (1.0 + share), 0.0)
            self._cost[here], self.step_time[here], self.missing[here] = (
                cost,
                found.step_time,
                missing,
            )

    def observe(self) -> dict[str, Array]:
        """What is to be seen in each row: [episodes, ...] each, and new each time."""
        case = self.case
        found = {key: array[case] for key, array in self._lasting.items()}
        # Sums of what came and went round: a device that is empty again may be a hair below zero.
        busy, held = np.maximum(self._busy, 0.0), np.maximum(self._held, 0.0)
        found["devices"][..., -2] = beside(busy, self._reference[case][:, None])
        found["devices"][..., -1] = beside(held, self._memory[case])
        found["placement"] = self._placed.copy()
        found["visited"] = self._visited.copy()
        found["current_group"] = self.current
        found["progress"] = (self.step / self.length)[:, None].astype(np.float32)
        found["action_mask"] = self.allowed
        return found

    def outcome(self, row: int) -> dict[str, Any]:
        """What is known of the placement of a row: its cost once it was simulated, itself at the
        end."""
        ended = bool(self.ended[row])
        found: dict[str, Any] = {}
        if ended or self.by_moves:
            found["step_time"] = float(self.step_time[row])
            found["feasible"] = bool(self.missing[row] == 0)
            found["missing_bytes"] = int(self.missing[row])
        if ended:
            found["placement"] = self.placement(row)
        return found

    def placement(self, row: int) -> Placement:
        """The placement of a row, which must be complete."""
        case = self.case_of(row)
        return case.placement(self.device[row, : case.num_groups])

    def complete(self, row: int) -> bool:
        """Whether every group of a row is on a device."""
        return bool((self.device[row, : self.case_of(row).num_groups] != _NOWHERE).all())

    def case_of(self, row: int) -> Case:
        """The problem of a row."""
        return self.cases[int(self.case[row])]
