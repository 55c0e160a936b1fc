"""Whatever is done to a file, reading it ends in a noun or in an InputError that names it, never in
a traceback."""

import json
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import roost
from roost.core import formats
from roost.errors import InputError
from roost.simulator import compiled, reference
from support.nasty import nasty

VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(
        ["a", "w", "cuda:0", "12GiB", "fifo", "parameter", "roost.graph", "1e400", "{source}"]
    ),
    st.lists(st.integers(-1, 5), max_size=6),
    st.dictionaries(st.sampled_from(["name", "ops", "version"]), st.integers(), max_size=2),
)


def places(value, path=()):
    """Every place in a JSON value where something can be changed."""
    yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list):
        for number in range(len(value)):
            yield from places(value[number], (*path, number))


def mutate(content, rng, value):
    """Replace, remove, repeat or swap something somewhere."""
    path = rng.choice([p for p in places(content) if p])
    parent = content
    for key in path[:-1]:
        parent = parent[key]
    action = rng.choice(["replace", "remove", "repeat", "swap", "add"])
    if action == "replace" or (isinstance(parent, dict) and action in ("repeat", "swap")):
        parent[path[-1]] = value
    elif action == "remove":
        del parent[path[-1]]
    elif action == "add" and isinstance(parent, dict):
        parent[str(value)[:8]] = value
    elif isinstance(parent, list):
        other = rng.randrange(len(parent))
        if action == "swap":
            parent[path[-1]], parent[other] = parent[other], parent[path[-1]]
        else:
            parent.insert(other, parent[path[-1]])


@pytest.fixture(scope="module")
def samples():
    problem, placement = nasty(11)
    full = roost.simulate(problem, placement, full=True)
    trial = roost.Trial(placement, full.step_time, full.peak_memory, full.feasible)
    result = roost.Result(trial, "by hand", 0, 1, 0.0, {"same": trial}, roost.Bound(0.0, "none"))
    return [
        formats.encode(noun) for noun in (problem.graph, problem, placement, full, trial, result)
    ]


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    number=st.integers(0, 5),
    seed=st.integers(0, 2**32),
    values=st.lists(VALUES, min_size=1, max_size=4),
)
def test_changed_fields(samples, number, seed, values):
    content, rng = json.loads(samples[number]), random.Random(seed)
    for value in values:
        mutate(content, rng, value)
    check(json.dumps(content).encode())


@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(number=st.integers(0, 5), seed=st.integers(0, 2**32), garbage=st.binary(max_size=6))
def test_changed_bytes(samples, number, seed, garbage):
    data, rng = bytearray(samples[number]), random.Random(seed)
    at = rng.randrange(len(data))
    data[at : at + rng.randrange(3)] = garbage
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    check(bytes(data))


@settings(max_examples=300, deadline=None)
@given(seed=st.integers(0, 2**32), garbage=st.text(max_size=6))
def test_changed_clusters(seed, garbage):
    text, rng = formats.encode(nasty(seed % 50)[0].cluster).decode(), random.Random(seed)
    at = rng.randrange(len(text))
    text = text[:at] + garbage + text[at + rng.randrange(4) :]
    check(text.encode(), toml=True)


def check(data, toml=False):
    try:
        noun = formats.decode(data, "some/file", toml=toml)
    except InputError as error:
        message = str(error)
    else:
        message = ""
    if message:
        assert message.startswith("some/file: ")
        return
    # What was accepted is sound: it can be saved, and a problem can be simulated.
    assert formats.decode(formats.encode(noun), "again", toml=toml) is not None
    if isinstance(noun, roost.Problem):
        placement = roost.Placement([0] * noun.graph.num_ops)
        try:
            expected = reference.simulate(noun, placement)
        except InputError:
            return
        assert compiled.simulate(noun, placement).step_time == expected.step_time
