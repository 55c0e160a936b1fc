"""A sequence of groups in, a sequence of devices out (Mirhoseini et al. 2017): LSTM encoder, LSTM
decoder, attention.

The encoder reads the groups in their order, both ways. The decoder gives a device to one group
after the other and is told which device it gave to the one before.

Differs in: attention is a choice, since at equal trials the decoder learns faster without it when
it gets the encoder's state of the group it is at (`aligned`). Of devices that can be exchanged, one
that nobody uses yet may be taken only after those before it (`twins`): otherwise the first hundreds
of trials go into agreeing on names. A prior may be added to the logits. Attention comes after the
recurrent cell, so that a whole batch needs one pass over the groups.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from roost.policies._recurrence import recurrence, step
from roost.policies._replay import Replay

_CLOSED = -1e9  # a logit that is never drawn


class Seq2Seq(nn.Module):
    """Logits for one problem: features [groups, features], allowed [groups, devices], prior
    [groups, devices].

    `twins` [devices] names for each device the one that must be in use before it, or -1.
    """

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
        self.attention, self.autoregressive, self.aligned = attention, autoregressive, aligned
        self.temperature, self.tanh = temperature, tanh
        self.register_buffer("features", features, persistent=False)
        self.register_buffer(
            "fixed", torch.where(allowed, prior, torch.tensor(_CLOSED)), persistent=False
        )
        before = torch.tensor([self.num_devices if twin < 0 else twin for twin in twins])
        self.register_buffer("before", before, persistent=False)
        self.has_twins = autoregressive and any(twin >= 0 for twin in twins)
        self.encoder = nn.LSTM(features.shape[1], hidden, bidirectional=True)
        self.enter = nn.Linear(2 * hidden, 4 * hidden)
        # The last one: nothing given yet.
        self.device = nn.Embedding(self.num_devices + 1, 4 * hidden)
        self.recur = nn.Parameter(torch.empty(hidden, 4 * hidden))
        self.leave = nn.Linear(
            hidden * (1 if attention == "none" else 3), self.num_devices, bias=False
        )
        if attention == "additive":
            self.query, self.key = (
                nn.Linear(hidden, hidden, bias=False),
                nn.Linear(2 * hidden, hidden, bias=False),
            )
            self.score = nn.Linear(hidden, 1, bias=False)
        elif attention == "dot":
            self.query = nn.Linear(hidden, 2 * hidden, bias=False)
        self.replay = Replay(self._drawn)
        self._begin(spread)

    features: Tensor
    fixed: Tensor
    before: Tensor

    def _begin(self, spread: float) -> None:
        """The last layer begins at zero, so that the first placements are drawn from the prior
        alone; or nearly so."""
        for name, weights in self.named_parameters():
            if weights.dim() > 1 and not name.startswith("device"):
                nn.init.xavier_uniform_(weights)
        nn.init.normal_(self.device.weight, std=0.3)
        with torch.no_grad():
            hidden = len(self.recur)
            self.enter.bias.zero_()
            self.enter.bias[2 * hidden : 3 * hidden] = 1.0  # forget little
            if spread == 0.0:
                self.leave.weight.zero_()
            else:
                self.leave.weight.mul_(spread)

    # ------------------------------------------------------------------ both ways of use

    def _encoded(self) -> tuple[Tensor, Tensor]:
        """The encoder's states [groups, 2 hidden], and what the decoder gets of them [groups, 4
        hidden]."""
        states, _ = self.encoder(self.features)
        given = self.enter(states)
        return states, given if self.aligned else given[-1:].expand_as(given)

    def _logits(self, hidden: Tensor, states: Tensor) -> Tensor:
        """Logits [groups, batch, devices] of hidden states [groups, batch, hidden], before what is
        fixed."""
        if self.attention != "none":
            hidden = torch.cat([hidden, self._attended(hidden, states)], dim=-1)
        logits = self.leave(hidden) / self.temperature
        return self.tanh * torch.tanh(logits) if self.tanh > 0 else logits

    def _attended(self, hidden: Tensor, states: Tensor) -> Tensor:
        if self.attention == "dot":
            weights = self.query(hidden) @ states.t() / states.shape[-1] ** 0.5
        else:
            key = self.key(states)
            rows = [
                self.score(torch.tanh(key + row.unsqueeze(-2))).squeeze(-1)
                for row in self.query(hidden)
            ]
            weights = torch.stack(rows)  # one group at a time: all at once would not fit in memory
        return torch.softmax(weights, dim=-1) @ states

    def log_probs(self, actions: Tensor) -> Tensor:
        """Logarithms of the probabilities [batch, groups, devices] with which each device was to be
        drawn.

        For actions [batch, groups]: each group's given those of the groups before it.
        """
        states, given = self._encoded()
        batch = len(actions)
        if self.autoregressive:
            start = actions.new_full((batch, 1), self.num_devices)
            told = self.device(torch.cat([start, actions[:, :-1]], dim=1)).transpose(0, 1)
            hidden = recurrence(given.unsqueeze(1) + told, self.recur)
        else:
            told = self.device.weight[-1]
            hidden = recurrence((given + told).unsqueeze(1), self.recur)
        logits = self._logits(hidden, states) + self.fixed.unsqueeze(1)
        if self.has_twins:
            logits = logits.masked_fill(~self._open(actions).transpose(0, 1), _CLOSED)
        return torch.log_softmax(logits, dim=-1).transpose(0, 1).expand(batch, -1, -1)

    def _open(self, actions: Tensor) -> Tensor:
        """[batch, groups, devices] whether the twin before a device is in use by then."""
        chosen = nn.functional.one_hot(actions, self.num_devices + 1)
        used = (chosen.cumsum(dim=1) - chosen) > 0
        used[..., self.num_devices] = True
        return used[..., self.before]

    @torch.no_grad()
    def sample(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Actions [count, groups] drawn one group after the other, and the log-probabilities of all
        devices."""
        drawn_here = torch.empty(self.num_groups, count, self.num_devices).exponential_(
            generator=generator
        )
        # Drawn by the CPU, so that equal seeds draw the same.
        noise = -drawn_here.log().to(self.fixed.device)
        if not self.autoregressive:
            log_probs = self.log_probs(self.before.new_zeros(count, self.num_groups))
            return (log_probs.transpose(0, 1) + noise).argmax(dim=-1).t(), log_probs
        actions, log_probs = self.replay(noise) if noise.is_cuda else self._drawn(noise)
        return actions, log_probs

    def _drawn(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """What `sample` gives, for noise [groups, count, devices] of a Gumbel distribution."""
        count = noise.shape[1]
        states, given = self._encoded()
        hidden = given.new_zeros(count, len(self.recur))
        cell = torch.zeros_like(hidden)
        action = self.before.new_full((count,), self.num_devices)
        used = self.before.new_zeros(count, self.num_devices + 1, dtype=torch.bool)
        used[:, self.num_devices] = True
        drawn, seen = [], []
        for number in range(self.num_groups):
            told = given[number] + self.device.weight[action]
            hidden, cell = step(told, self.recur, hidden, cell)
            logits = self._logits(hidden.unsqueeze(0), states)[0] + self.fixed[number]
            if self.has_twins:
                logits.masked_fill_(~used[:, self.before], _CLOSED)
            action = (logits + noise[number]).argmax(dim=-1)
            used.scatter_(1, action.unsqueeze(1), True)
            drawn.append(action)
            seen.append(logits)
        return torch.stack(drawn, dim=1), torch.log_softmax(torch.stack(seen, dim=1), dim=-1)
