"""Small steps that all learners with gradients share."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAST_LOG = -50.0  # below it, p log p counts as 0: a closed choice has a log of -1e9


def mean_entropy(log_probs: Tensor) -> Tensor:
    """Mean entropy of distributions [..., choices]."""
    return -(log_probs.exp() * log_probs.clamp(min=_LEAST_LOG)).sum(dim=-1).mean()


def log_probs_of(actions: Tensor, log_probs: Tensor) -> Tensor:
    """Log-probabilities [...] of the actions taken [...], from those of all choices."""
    return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)


def clipped_gradients(optimizer: torch.optim.Optimizer, loss: Tensor, most_norm: float) -> float:
    """Compute the gradients of a loss, clip their norm, and return the norm before clipping."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    return clip_norm(optimizer, most_norm)


def clip_norm(optimizer: torch.optim.Optimizer, most_norm: float) -> float:
    """Clip the norm of all gradients, and return the norm before clipping."""
    parameters = [param for group in optimizer.param_groups for param in group["params"]]
    return float(torch.nn.utils.clip_grad_norm_(parameters, most_norm))
