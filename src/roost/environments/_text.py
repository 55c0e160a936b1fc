"""An episode as text: a line of progress, and a table of its devices."""

from __future__ import annotations

import numpy as np

from roost.core.units import show_bytes, show_seconds
from roost.environments._episodes import EnvironmentEpisodes


def text_of(episodes: EnvironmentEpisodes, row: int) -> str:
    """One episode, with a line for each device."""
    if episodes.step[row] < 0:
        return "not reset yet\n"
    grouped = episodes.grouped(row)
    units = grouped.units
    cluster = grouped.problem.cluster
    group_device = episodes.device[row, : grouped.num_groups]
    lines = [f"{grouped.problem.graph.name} on {cluster.name}: {_progress(episodes, row)}"]
    lines.append(f"{'device':<12}{'groups':>8}{'busy':>12}{'held':>12}{'memory':>12}")
    for number, device in enumerate(cluster.devices):
        here = np.flatnonzero(group_device == number)
        busy = show_seconds(units.time[here, number].sum())
        held = show_bytes(grouped.held_bytes[here].sum())
        memory = show_bytes(device.memory)
        lines.append(f"{device.name:<12}{len(here):>8}{busy:>12}{held:>12}{memory:>12}")
    return "\n".join(lines) + "\n"


def _progress(episodes: EnvironmentEpisodes, row: int) -> str:
    ended = bool(episodes.ended[row])
    step, length, group = (x[row] for x in (episodes.step, episodes.length, episodes.current))
    turn = f"step {step} of {length}, group {group} is next"
    if not ended and not episodes.by_moves:
        return turn
    missing = int(episodes.missing[row])
    fits = f"{show_bytes(missing)} do not fit" if missing else "fits"
    cost = f"{show_seconds(float(episodes.step_time[row]))} a step, {fits}"
    return cost if ended else f"{turn}; {cost}"
