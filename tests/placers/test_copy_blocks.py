"""Moves of stretches of layers and copies."""

from __future__ import annotations

from layered_step import layered_step, machine, step_problem, unrolled

from roost.placers._annealing.move_space import space_of
from roost.placers._shared.units import Units
from roost.transforms.microbatch import SHARED, copies_of


def blocks_of_copies(problem):
    units = Units.of(problem, "nothing")
    space = space_of(units)
    first, beyond = space.level[4], space.level[5]
    found = []
    for block in range(first, beyond):
        members = space.block_unit[space.block_start[block] : space.block_start[block + 1]]
        found.append(frozenset(problem.graph.op_names[units.leader[unit]] for unit in members))
    return found


def test_a_copy_a_layer_and_a_stretch_of_both_can_move_as_one():
    problem = unrolled(4)
    blocks = blocks_of_copies(problem)
    names = problem.graph.op_names
    copy = copies_of(problem.graph)
    assert {name for name, which in zip(names, copy, strict=True) if which == 2} in blocks
    layer = {"y1", "gx1", "gw1"}
    assert {f"{name}#{which}" for name in layer for which in range(4)} in blocks
    stretch = {"y2", "gx2", "gw2", "y3", "gx3", "gw3"}
    assert {f"{name}#{which}" for name in stretch for which in (0, 1)} in blocks


def test_what_exists_once_is_in_no_stretch():
    problem = unrolled(2)
    once = {
        name
        for name, copy in zip(problem.graph.op_names, copies_of(problem.graph), strict=True)
        if copy == SHARED
    }
    assert not any(once & block for block in blocks_of_copies(problem))


def test_a_step_that_is_not_unrolled_has_no_such_moves():
    space = space_of(Units.of(step_problem(layered_step(), machine())))
    assert len(space.level) == 5
