"""Updates from recorded decisions: imitation, and a clipped policy gradient (Schulman et al. 2017,
arXiv 1707.06347).

`lister` learns by them. Differs in: there is no value network. The advantage of a schedule is its
normalised gain over the other schedules of the same problem, so problems of all sizes count alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array
from roost.learners.gradients import clipped_gradients, log_probs_of, mean_entropy
from roost.learners.rewards import standardised
from roost.policies.lister_network import Decisions, ListerPolicy

_MOST_NORM = 1.0  # of the gradient
_LEAST_SPREAD = 1e-9  # of gains: below it, all schedules count as equal
_MOST_CHANGE = 10.0  # of a log-probability, before it is a ratio
_RATIOS = 0.8, 1.25  # of new to old probability: a larger change gains nothing more


def imitate(
    policy: ListerPolicy, optimizer: torch.optim.Optimizer, rows: Decisions, label: Tensor
) -> float:
    """Take one step towards labels [rows] (-1: no label), and return the loss before it."""
    labelled = label >= 0
    if not bool(labelled.any()):
        return 0.0
    loss = -log_probs_of(label[labelled], policy(rows)[labelled]).mean()
    _step(optimizer, loss)
    return float(loss.detach())


def clipped(
    policy: ListerPolicy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Decisions, Tensor, Tensor]],
    entropy_bonus: float,
) -> dict[str, float]:
    """Take one step on the decisions of several problems, and return figures of it.

    Each problem has decisions, their log-probabilities when they were made, and their advantages.
    """
    loss = torch.zeros(())
    entropies = []
    changes = []
    for rows, before, advantage in batches:
        log_probs = policy(rows)
        log_ratio = log_probs_of(rows.choice, log_probs) - before
        change = torch.exp(log_ratio.clamp(-_MOST_CHANGE, _MOST_CHANGE))
        gain = torch.minimum(change * advantage, change.clamp(*_RATIOS) * advantage)
        entropy = mean_entropy(log_probs)
        loss = loss - (gain.mean() + entropy_bonus * entropy) / len(batches)
        entropies.append(float(entropy.detach()))
        changes.append(float((change.detach() - 1).abs().mean()))
    norm = _step(optimizer, loss)
    return {
        "loss": float(loss.detach()),
        "norm": norm,
        "entropy": float(np.mean(entropies)),
        "change": float(np.mean(changes)),
    }


def advantages(cost: Array, best_of: int) -> Array:  # [schedules]
    """Advantages of the schedules of one problem over each other; a lower cost is better.

    A schedule counts by what it adds, on average, to the best of `best_of` schedules: so variety
    pays.
    """
    return standardised(_added_to_best(-cost, best_of), _LEAST_SPREAD)


def _added_to_best(value: Array, k: int) -> Array:
    """For each i, the mean of the highest value over all sets of k that hold i."""
    count = len(value)
    k = min(k, count)
    order = np.argsort(value, kind="stable")
    ranked = value[order]
    rank = np.arange(count)
    log_choose = _log_choose(count)
    total = log_choose[count - 1, k - 1]
    # i is the highest of a set if all others are below it. Else some j above it is the highest.
    highest = np.exp(log_choose[rank, k - 1] - total)
    with_other = np.concatenate([[0.0], np.exp(log_choose[rank[1:] - 1, k - 2] - total)])
    from_rank_on = np.cumsum((with_other * ranked)[::-1])[::-1]
    above = np.concatenate([from_rank_on[1:], [0.0]])
    added = np.zeros(count)
    added[order] = highest * ranked + above
    return added


def _log_choose(count: int) -> Array:  # [count + 1, count + 1]
    """Logarithms of the number of ways to choose k of n; minus infinity for k above n."""
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    n, k = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    rest = log_factorial[np.maximum(n - k, 0)]
    log_choose = log_factorial[n] - log_factorial[np.minimum(k, n)] - rest
    return np.where(k <= n, log_choose, -np.inf)


def _step(optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    norm = clipped_gradients(optimizer, loss, _MOST_NORM)
    if np.isfinite(norm):  # a step from a broken loss would spoil all weights
        optimizer.step()
    return norm
