"""Small PyTorch models with the traps that a front-end may fall into."""

import torch
import torch.nn.functional as F
from torch import nn


class Everything(nn.Module):
    """Tied weights, buffers that change, attention, nn.LSTM, a constant, views of every kind."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.norm = nn.BatchNorm1d(32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("position", torch.arange(10), persistent=False)
        self.constant = torch.ones(3)

    def forward(self, tokens, targets=None):
        h = self.embed(tokens) + self.position[:, None] * self.constant.sum()
        q, k, v = self.qkv(h).view(2, 10, 3, 4, 8).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).reshape(2, 10, 32))
        h = self.drop(self.norm(h.transpose(1, 2)).transpose(1, 2))
        h, _ = self.lstm(h)
        scores = self.head(h)
        return scores if targets is None else F.cross_entropy(scores.view(-1, 50), targets.view(-1))


def everything(**settings):
    torch.manual_seed(0)
    return Everything(**settings), (torch.randint(0, 50, (2, 10)), torch.randint(0, 50, (2, 10)))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, stride=2)
        self.head = nn.Linear(8, 10)

    def forward(self, images, targets=None):
        h = F.max_pool2d(F.relu(self.norm(self.first(images))), 2)
        h = F.adaptive_avg_pool2d(F.gelu(self.second(h)), 1).flatten(1)
        scores = self.head(h)
        return scores if targets is None else F.cross_entropy(scores, targets)


def convolutions():
    torch.manual_seed(0)
    return Convolutions(), (torch.randn(4, 3, 16, 16), torch.randint(0, 10, (4,)))


class DecidesByValue(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        if y.sum() > 0:  # the line to be named
            return y
        return -y


def decides_by_value():
    return DecidesByValue(), (torch.randn(2, 4),)


not_a_model = 3
