"""A sequence of groups in, a sequence of devices out (Mirhoseini et al. 2017).

`seq2seq` and `spotlight` learn with it. An LSTM encoder reads the groups in their order, both ways.
An LSTM decoder gives a device to one group after the other. It sees the device of the group before.

Differs in: attention is a choice, and it comes after the recurrent cell, so that a whole batch
needs one pass over the groups. At equal trials the decoder learns faster without attention if it
gets the encoder's state of the current group (`aligned`). Of exchangeable devices, an unused one
may only be taken after those before it (`twins`); else the first hundreds of trials go into
agreeing on names. A prior may be added to the logits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roost.policies._gpu_replay import GpuReplay
from roost.policies._lstm import lstm_states, lstm_step

_CLOSED = -1e9  # a logit that is never drawn


class Seq2Seq(nn.Module):
    """A policy for one problem.

    `features` [groups, features], `allowed` and `prior` [groups, devices]. `twins` [devices] names
    for each device the one that must be in use before it, or -1. `attention` is none, dot or
    additive. Logits are divided by `temperature`, then squashed to +-`tanh` if that is above 0. The
    first logits differ from the prior by an amount that grows with `spread`.
    """

    features: Tensor
    fixed: Tensor  # [groups, devices] the prior, or a closed logit
    before: Tensor  # [devices] twin before each device, or the number of devices

    def __init__(
        self,
        features: Tensor,
        allowed: Tensor,
        prior: Tensor,
        twins: list[int],
        hidden: int = 64,
        attention: str = "none",
        autoregressive: bool = True,
        aligned: bool = True,
        temperature: float = 1.0,
        tanh: float = 0.0,
        spread: float = 0.0,
    ) -> None:
        super().__init__()
        self.num_groups, self.num_devices = allowed.shape
        self.attention = attention
        self.autoregressive = autoregressive
        self.aligned = aligned
        self.temperature = temperature
        self.tanh = tanh
        self.has_twins = autoregressive and any(twin >= 0 for twin in twins)
        before = torch.tensor([self.num_devices if twin < 0 else twin for twin in twins])
        fixed = torch.where(allowed, prior, torch.tensor(_CLOSED))
        for name, value in (("features", features), ("fixed", fixed), ("before", before)):
            self.register_buffer(name, value, persistent=False)
        self.encoder = nn.LSTM(features.shape[1], hidden, bidirectional=True)
        self.enter = nn.Linear(2 * hidden, 4 * hidden)
        # The last row stands for "no group before".
        self.device = nn.Embedding(self.num_devices + 1, 4 * hidden)
        self.recur = nn.Parameter(torch.empty(hidden, 4 * hidden))
        width = hidden if attention == "none" else 3 * hidden
        self.leave = nn.Linear(width, self.num_devices, bias=False)
        if attention == "additive":
            self.query = nn.Linear(hidden, hidden, bias=False)
            self.key = nn.Linear(2 * hidden, hidden, bias=False)
            self.score = nn.Linear(hidden, 1, bias=False)
        elif attention == "dot":
            self.query = nn.Linear(hidden, 2 * hidden, bias=False)
        self.replay = GpuReplay(self._draw)
        self._initialise(spread)

    def _initialise(self, spread: float) -> None:
        """First weights; those of the last layer are scaled by `spread`."""
        for name, weights in self.named_parameters():
            if weights.dim() > 1 and not name.startswith("device"):
                nn.init.xavier_uniform_(weights)
        nn.init.normal_(self.device.weight, std=0.3)
        hidden = len(self.recur)
        with torch.no_grad():
            self.enter.bias.zero_()
            self.enter.bias[2 * hidden : 3 * hidden] = 1.0  # forget little
            self.leave.weight.mul_(spread)

    # ------------------------------------------------------------------ both ways of use

    def _encode(self) -> tuple[Tensor, Tensor]:
        """States of the encoder [groups, 2 hidden], inputs of the decoder [groups, 4 hidden]."""
        states, _ = self.encoder(self.features)
        inputs = self.enter(states)
        return states, inputs if self.aligned else inputs[-1:].expand_as(inputs)

    def _logits(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Logits [groups, batch, devices] of hidden states [groups, batch, hidden], without
        `fixed`."""
        if self.attention != "none":
            hidden = torch.cat([hidden, self._attend(hidden, states)], dim=-1)
        logits = self.leave(hidden) / self.temperature
        return self.tanh * torch.tanh(logits) if self.tanh > 0 else logits

    def _attend(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Means of the encoder's states, weighted by attention [groups, batch, 2 hidden]."""
        query = self.query(hidden)
        if self.attention == "dot":
            weights = query @ states.t() / states.shape[-1] ** 0.5
        else:
            key = self.key(states)
            # One group at a time: all at once would not fit in memory.
            sums = (torch.tanh(key + row.unsqueeze(-2)) for row in query)
            weights = torch.stack([self.score(each).squeeze(-1) for each in sums])
        return torch.softmax(weights, dim=-1) @ states

    def log_probs(self, actions: Tensor) -> Tensor:
        """Log-probabilities [batch, groups, devices] with which `sample` draws each device.

        Those of a group depend on the actions [batch, groups] of the groups before it.
        """
        states, inputs = self._encode()
        batch = len(actions)
        if self.autoregressive:
            start = actions.new_full((batch, 1), self.num_devices)
            previous = torch.cat([start, actions[:, :-1]], dim=1)
            gates = inputs.unsqueeze(1) + self.device(previous).transpose(0, 1)
        else:
            gates = (inputs + self.device.weight[-1]).unsqueeze(1)
        logits = self._logits(lstm_states(gates, self.recur), states) + self.fixed.unsqueeze(1)
        if self.has_twins:
            logits = logits.masked_fill(~self._open(actions).transpose(0, 1), _CLOSED)
        return torch.log_softmax(logits, dim=-1).transpose(0, 1).expand(batch, -1, -1)

    def _open(self, actions: Tensor) -> Tensor:
        """[batch, groups, devices] bool: the twin before the device is in use by then."""
        chosen = nn.functional.one_hot(actions, self.num_devices + 1)
        used = (chosen.cumsum(dim=1) - chosen) > 0
        used[..., self.num_devices] = True
        return used[..., self.before]

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Draw actions [count, groups], and return them with the log-probabilities of all devices.

        The CPU draws the noise, so that equal seeds give equal actions on any device.
        """
        exponential = torch.empty(self.num_groups, count, self.num_devices)
        noise = -exponential.exponential_(generator=generator).log().to(self.fixed.device)
        if not self.autoregressive:
            log_probs = self.log_probs(self.before.new_zeros(count, self.num_groups))
            return (log_probs.transpose(0, 1) + noise).argmax(dim=-1).t(), log_probs
        actions, log_probs = self.replay(noise) if noise.is_cuda else self._draw(noise)
        return actions, log_probs

    def _draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """`sample` for given noise [groups, count, devices] of a Gumbel distribution."""
        count = noise.shape[1]
        states, inputs = self._encode()
        hidden = inputs.new_zeros(count, len(self.recur))
        cell = torch.zeros_like(hidden)
        action = self.before.new_full((count,), self.num_devices)
        used = self.before.new_zeros(count, self.num_devices + 1, dtype=torch.bool)
        used[:, self.num_devices] = True
        actions = []
        all_logits = []
        for group in range(self.num_groups):
            gates = inputs[group] + self.device.weight[action]
            hidden, cell = lstm_step(gates, self.recur, hidden, cell)
            logits = self._logits(hidden.unsqueeze(0), states)[0] + self.fixed[group]
            if self.has_twins:
                logits.masked_fill_(~used[:, self.before], _CLOSED)
            action = (logits + noise[group]).argmax(dim=-1)
            used.scatter_(1, action.unsqueeze(1), True)
            actions.append(action)
            all_logits.append(logits)
        log_probs = torch.log_softmax(torch.stack(all_logits, dim=1), dim=-1)
        return torch.stack(actions, dim=1), log_probs
