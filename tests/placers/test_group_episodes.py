"""Episodes in which groups have their turn one by one."""

from __future__ import annotations

import numpy as np

from roost.placers.toolkit import GroupEpisodes

NOWHERE = GroupEpisodes.NOWHERE


def test_each_row_visits_its_groups_in_its_own_order() -> None:
    episodes = GroupEpisodes()
    episodes.make_room(2, 3)
    episodes.start(0, NOWHERE, [0, 1])  # a problem of two groups beside one of three
    episodes.start(1, np.array([5, 5, 5]), [2, 0, 1], sweeps=2)
    groups = []
    while not episodes.ended[0]:
        groups.append(episodes.current.tolist())
        episodes.put(np.arange(2), np.array([7, 8]))
    assert groups == [[0, 2], [1, 0]]
    assert episodes.device.tolist() == [[7, 7, NOWHERE], [8, 5, 8]]
    assert episodes.visited.tolist() == [[True, True, False], [True, False, True]]
    last = np.array([1])
    assert [episodes.put(last, last).tolist() for _ in range(4)] == [[5], [8], [8], [1]]
    assert episodes.ended.tolist() == [True, True]
    episodes.start(0, 3, [1, 0])
    assert episodes.device[0].tolist() == [3, 3, NOWHERE]
    assert not episodes.visited[0].any()
