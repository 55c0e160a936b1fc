"""Weights pass through a window in whatever order modules come."""

import numpy as np
import pytest
import torch

from roost.runtime.whole.copy_streams import ThreadCopyQueue
from roost.runtime.whole.weight_window import ModuleWeights, WeightWindow


class LateCopyQueue:
    """Copies when it is waited for, or when an event says that the place is free: as late as can
    be."""

    def __init__(self):
        self.waiting, self.events = [], 0

    def copy(self, pairs, after):
        assert all(event <= self.events for event in after)
        self.waiting.append(pairs)
        return len(self.waiting)

    def wait(self, ready):
        for pairs in self.waiting[:ready]:
            for target, source in pairs:
                target.copy_(source)
        self.waiting[:ready] = [[] for _ in range(ready)]

    def record_event(self):
        self.events += 1
        return self.events

    def close(self):
        pass


def loads(rng, count, most=3000):
    sizes = rng.integers(1, most, count)
    return [
        ModuleWeights(str(n), [torch.full((int(s),), float(n)), torch.full((3,), n)])
        for n, s in enumerate(sizes)
    ]


@pytest.mark.parametrize("way", [ThreadCopyQueue, LateCopyQueue])
@pytest.mark.parametrize("seed", range(20))
def test_each_module_finds_its_own_weights_whatever_comes(seed, way):
    rng = np.random.default_rng(seed)
    known = loads(rng, int(rng.integers(1, 12)))
    window = WeightWindow(way(), torch.device("cpu"), int(rng.integers(0, 40_000)), known)
    order = list(range(len(known)))
    for _ in range(6):
        if rng.random() < 0.5:  # as expected, or with some left out, repeated and exchanged
            order = rng.integers(0, len(known), int(rng.integers(1, 15))).tolist()
        for number in order:
            entry = window.enter(known[number])
            assert all((view == number).all() for view in entry.views)
            assert [view.dtype for view in entry.views] == [torch.float32, torch.int64]
            window.leave(entry)
        window.end_run()
    window.close()


def test_a_run_like_the_last_one_finds_everything_fetched():
    known = loads(np.random.default_rng(0), 9)
    window = WeightWindow(ThreadCopyQueue(), torch.device("cpu"), 30_000, known)
    for run in range(3):
        for load in reversed(known):
            window.leave(window.enter(load))
        window.end_run()
        if run == 0:
            learned = window.num_unexpected
    assert window.num_unexpected == learned
    window.close()


def test_a_module_inside_another_has_weights_too():
    known = loads(np.random.default_rng(1), 3, most=10)
    window = WeightWindow(ThreadCopyQueue(), torch.device("cpu"), 0, known)  # room for one alone
    outer = window.enter(known[0])
    inner = window.enter(known[1])
    assert (inner.views[0] == 1).all()
    assert (outer.views[0] == 0).all()
    window.leave(inner)
    assert (outer.views[0] == 0).all()
    window.leave(outer)
    last = window.enter(known[2])
    assert (last.views[0] == 2).all()
    window.leave(last)
    window.close()
