"""Updates from recorded decisions: imitation, and a clipped policy gradient (Schulman et al. 2017,
arXiv 1707.06347).

Differs in: no value network, the advantage of a schedule is its rank among those of the same
problem or its normalised gain; so schedules of problems of all sizes weigh the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roost.core.arrays import Array
from roost.policies.lister_network import Decisions, Policy

_MOST_NORM = 1.0  # of the gradient


def imitate(
    policy: Policy, optimizer: torch.optim.Optimizer, rows: Decisions, label: Tensor
) -> float:
    """One step towards these labels [rows], -1 where there is none; the loss before it."""
    kept = label >= 0
    if not bool(kept.any()):
        return 0.0
    found = policy(rows)[kept]
    loss = -found.gather(1, label[kept].unsqueeze(1)).mean()
    _step(policy, optimizer, loss)
    return float(loss.detach())


def clipped(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    batches: Sequence[tuple[Decisions, Tensor, Tensor]],
    entropy_bonus: float,
    ratio: tuple[float, float] = (0.8, 1.25),
) -> dict[str, float]:
    """One step on decisions, their log-probabilities when they were made, and their advantages, for
    each problem."""
    loss = torch.zeros(())
    entropies, ratios = [], []
    for rows, before, advantage in batches:
        every = policy(rows)
        now = every.gather(1, rows.choice.unsqueeze(1)).squeeze(1)
        change = torch.exp((now - before).clamp(-10.0, 10.0))
        gain = torch.minimum(change * advantage, change.clamp(*ratio) * advantage)
        entropy = -(every.exp() * every.clamp_min(-50.0)).sum(1)
        loss = loss - (gain.mean() + entropy_bonus * entropy.mean()) / len(batches)
        entropies.append(float(entropy.detach().mean()))
        ratios.append(float((change.detach() - 1).abs().mean()))
    norm = _step(policy, optimizer, loss)
    figures = {"entropy": float(np.mean(entropies)), "change": float(np.mean(ratios))}
    return {"loss": float(loss.detach()), "norm": norm, **figures}


def advantages(cost: Array, best_of: int = 1) -> Array:  # [rolls]
    """How much better each schedule is than the others of its problem, from costs [rolls], lower is
    better.

    With `best_of` k above 1: what a schedule adds to the best of k drawn from these, on average, so
    that variety pays.
    """
    gain = _added_to_best(-cost, best_of) if best_of > 1 else cost.mean() - cost
    spread = gain.std()
    return (
        np.clip((gain - gain.mean()) / spread, -3.0, 3.0) if spread > 1e-9 else np.zeros(len(cost))
    )


def _added_to_best(value: Array, k: int) -> Array:
    """For each i: the mean over sets of k that hold i of the highest value."""
    count = len(value)
    k = min(k, count)
    order = np.argsort(value, kind="stable")
    ranked = value[order]
    # Of the sets with i: i is the highest when all others are below it; else some j above it is the
    # highest.
    log_choose = _log_choose(count)
    total = log_choose[count - 1, k - 1]
    found = np.zeros(count)
    rank = np.arange(count)
    alone = np.exp(log_choose[rank, k - 1] - total)
    with_other = np.concatenate([[0.0], np.exp(log_choose[rank[1:] - 1, k - 2] - total)])
    above = np.concatenate([np.cumsum((with_other * ranked)[::-1])[::-1][1:], [0.0]])
    found[order] = alone * ranked + above
    return found


def _log_choose(count: int) -> Array:
    log_factorial = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    n, k = np.meshgrid(np.arange(count + 1), np.arange(count + 1), indexing="ij")
    found = log_factorial[n] - log_factorial[np.minimum(k, n)] - log_factorial[np.maximum(n - k, 0)]
    return np.where(k <= n, found, -np.inf)


def _step(policy: Policy, optimizer: torch.optim.Optimizer, loss: Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), _MOST_NORM))
    if np.isfinite(norm):  # a step from a broken loss would spoil all weights
        optimizer.step()
    return norm
