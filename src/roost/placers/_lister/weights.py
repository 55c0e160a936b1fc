"""Weights of `lister`: its network, its samplers and its rules, new ones or those of a file.

A sampler is a way to draw schedules from the network: a tilt of its linear rule [features], a
temperature and the number of an order. In a file the samplers are the tensor "ways".
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from roost.core.arrays import Array
from roost.errors import InputError
from roost.placers._lister.compiled_network import NetworkWeights
from roost.placers._lister.device_features import DEVICE_FEATURES
from roost.placers._lister.network_scheduler import ORDERS, NetworkScheduler
from roost.placers._lister.portable_rules import COLUMNS, are_valid, drawn_rules
from roost.placers._lister.unit_features import NUM_UNIT_FEATURES
from roost.policies.lister_weights import new_weights, weight_shapes
from roost.policies.weights import load_weights

NUM_FEATURES = len(DEVICE_FEATURES)
PORTFOLIO = 64  # rules in a file of weights, and samplers
NO_NETWORK = ("ways", "rules")  # tensors that the network does not have

_FIRST_RULE = {"finish_gap_ticks": -3.0, "outgoing_ticks": -1.0, "slower_in_all": -0.5}

_SHARE = 0.15  # of the features, in a tilt
_SCALES = (0.2, 4.0)  # of a tilt, at least and at most
_HEATS = (0.0, 0.0, 0.3, 1.0)


def new_tensors(rng: np.random.Generator) -> dict[str, Array]:
    """A network that begins as a rule of earliest finish, random samplers and random rules."""
    rule = np.zeros(NUM_FEATURES)
    for name, weight in _FIRST_RULE.items():
        rule[DEVICE_FEATURES.index(name)] = weight
    samplers = random_samplers(rng, PORTFOLIO, len(ORDERS))
    rules = drawn_rules(rng, PORTFOLIO)
    network = new_weights(rng, NUM_FEATURES, NUM_UNIT_FEATURES, rule)
    return {**network, "ways": samplers, "rules": rules}


def load(path: str) -> dict[str, Array]:
    """The weights in a file, checked."""
    others = {"ways": (PORTFOLIO, NUM_FEATURES + 2), "rules": (PORTFOLIO, len(COLUMNS))}
    expected = {**weight_shapes(NUM_FEATURES, NUM_UNIT_FEATURES), **others}
    tensors, _ = load_weights(path, "lister", expected)
    try:
        check_samplers(tensors["ways"])
        if not are_valid(tensors["rules"]):
            raise InputError("tensor 'rules' has an invalid setting")
    except InputError as error:
        raise InputError(f"{path}: {error}; train them again") from None
    return tensors


def network_only(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The tensors of the network, without samplers and rules."""
    return {name: value for name, value in tensors.items() if name not in NO_NETWORK}


def network_of(tensors: Mapping[str, Array], scheduler: NetworkScheduler) -> NetworkWeights:
    """The weights as the compiled loop reads them for one problem."""
    base = scheduler.features @ tensors["known"] + tensors["bias"]
    names = [name for name in NetworkWeights._fields if name != "base"]
    others = {name: np.ascontiguousarray(tensors[name]) for name in names}
    return NetworkWeights(base=np.ascontiguousarray(base), **others)


def random_samplers(rng: np.random.Generator, count: int, num_orders: int) -> Array:
    """[samplers, features + 2] tilts, temperatures and orders.

    The first sampler of each order is the network alone.
    """
    samplers = np.zeros((count, NUM_FEATURES + 2), np.float32)
    scale = np.exp(rng.uniform(np.log(_SCALES[0]), np.log(_SCALES[1]), (count, 1)))
    is_tilted = rng.random((count, NUM_FEATURES)) < _SHARE
    tilt = is_tilted * rng.normal(0.0, 1.0, (count, NUM_FEATURES)) * scale
    samplers[:, :NUM_FEATURES] = tilt
    samplers[:, NUM_FEATURES] = rng.choice(_HEATS, count)
    samplers[:, NUM_FEATURES + 1] = np.arange(count) % num_orders
    samplers[:num_orders, : NUM_FEATURES + 1] = 0.0
    return samplers


def check_samplers(samplers: Array) -> None:
    """Raise InputError if an order or a temperature is invalid."""
    heat = samplers[:, NUM_FEATURES]
    order = samplers[:, -1]
    if not np.isin(order, np.arange(len(ORDERS))).all() or (heat < 0).any():
        raise InputError("tensor 'ways' has an invalid order or temperature")
