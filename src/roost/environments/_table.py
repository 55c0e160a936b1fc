"""An episode as text: what is on each device."""

from __future__ import annotations

import numpy as np

from roost.core.units import show_bytes, show_seconds
from roost.environments._episodes import Episodes


def table(episodes: Episodes, row: int) -> str:
    """A line on how far it is, then one for each device."""
    if episodes.step[row] < 0:
        return "not reset yet\n"
    case = episodes.case_of(row)
    units, cluster = case.units, case.problem.cluster
    device = episodes.device[row, : case.num_groups]
    lines = [f"{case.problem.graph.name} on {cluster.name}: {_state(episodes, row)}"]
    lines.append(f"{'device':<12}{'groups':>8}{'busy':>12}{'held':>12}{'memory':>12}")
    for number, one in enumerate(cluster.devices):
        here = np.flatnonzero(device == number)
        busy, held = units.time[here, number].sum(), case.held_bytes[here].sum()
        lines.append(
            f"{one.name:<12}{len(here):>8}{show_seconds(busy):>12}{show_bytes(held):>12}{show_bytes(one.memory):>12}"
        )
    return "\n".join(lines) + "\n"


def _state(episodes: Episodes, row: int) -> str:
    ended = bool(episodes.ended[row])
    turn = (
        f"step {episodes.step[row]} of {episodes.length[row]}, group {episodes.current[row]} is "
        f"next"
    )
    if not ended and not episodes.by_moves:
        return turn
    missing = int(episodes.missing[row])
    cost = f"{show_seconds(float(episodes.step_time[row]))} a step, "
    cost += f"{show_bytes(missing)} do not fit" if missing else "fits"
    return cost if ended else f"{turn}; {cost}"
