"""Random numbers in compiled loops; the state is one word, so that a loop can go on later.

SplitMix64 (Steele, Lea, Flood 2014).
"""

from __future__ import annotations

import numpy as np

from roost.simulator.kernels.base import inlined

_STEP = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S30 = np.uint64(30)
_S27 = np.uint64(27)
_S31 = np.uint64(31)
_S11 = np.uint64(11)
_S32 = np.uint64(32)
_UNIT = 1.0 / 9007199254740992.0  # 2**-53


@inlined
def word(state):
    """Sixty-four random bits. `state` [1] is u8."""
    state[0] += _STEP
    mixed = state[0]
    mixed = (mixed ^ (mixed >> _S30)) * _FIRST
    mixed = (mixed ^ (mixed >> _S27)) * _SECOND
    return mixed ^ (mixed >> _S31)


@inlined
def uniform(state):
    """A number from 0 up to 1."""
    return np.float64(word(state) >> _S11) * _UNIT


@inlined
def below(state, count):
    """A whole number from 0 up to `count`, which is less than 2**31."""
    return np.int64(((word(state) >> _S32) * np.uint64(count)) >> _S32)
