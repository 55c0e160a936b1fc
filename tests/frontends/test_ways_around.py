"""The table of docs/capture.md: each model that is refused, and the way around it that works."""

import pytest
import torch
from torch import nn

from roost.errors import UnsupportedOp
from roost.frontends.torch import capture

transformers = pytest.importorskip("transformers", reason="needs the hf extra")

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))


class Detector(nn.Module):
    """Scores boxes, then keeps the best: how many depends on the image."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(8, 1)

    def forward(self, x):
        return x[self.scores(x).squeeze(1) > 0]


class Guarded(nn.Module):
    """Looks for NaN in what it computes."""

    def __init__(self, guarded: bool) -> None:
        super().__init__()
        self.layer, self.guarded = nn.Linear(8, 8), guarded

    def forward(self, x):
        y = self.layer(x)
        if self.guarded and torch.isnan(y).any():
            raise ValueError("NaN")
        return y


class Clamped(nn.Module):
    """Clamps where a value is infinite."""

    def __init__(self, by_where: bool) -> None:
        super().__init__()
        self.layer, self.by_where = nn.Linear(8, 8), by_where

    def forward(self, x):
        y = self.layer(x)
        if self.by_where:
            return torch.where(torch.isinf(y).any(), y.clamp(-1e4, 1e4), y)
        return y.clamp(-1e4, 1e4) if torch.isinf(y).any() else y


class Graph(nn.Module):
    """Takes self loops out of the edges of a graph, then adds one for each node."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def edges(self, ends):
        ends = ends[:, ends[0] != ends[1]]
        own = torch.arange(6).repeat(2, 1)
        return torch.cat([ends, own], dim=1)

    def forward(self, x, ends):
        return self.convolve(x, self.edges(ends))

    def convolve(self, x, ends):
        y = self.layer(x)
        return torch.zeros_like(y).index_add(0, ends[1], y[ends[0]])


class Convolved(nn.Module):
    """The same network on edges that are ready."""

    def __init__(self, network) -> None:
        super().__init__()
        self.network = network

    def forward(self, x, ends):
        return self.network.convolve(x, ends)


class UntilSmall(nn.Module):
    """Repeats a layer until the values are small, or a fixed number of times."""

    def __init__(self, steps: int | None) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(8, 8), steps

    def forward(self, x):
        if self.steps is None:
            while x.norm() > 1:
                x = self.layer(x)
        for _ in range(self.steps or 0):
            x = self.layer(x)
        return x


def wav2vec2(layerdrop: float) -> nn.Module:
    config = transformers.Wav2Vec2Config(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(16,),
        conv_kernel=(10,),
        conv_stride=(5,),
        num_feat_extract_layers=1,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        layerdrop=layerdrop,
        apply_spec_augment=False,
    )
    return transformers.Wav2Vec2Model(config)


ENDS = torch.tensor([[0, 1, 2, 3], [1, 1, 3, 0]])
WAYS = {
    "detection head": ((Detector(), X), (Detector().scores, X), False),
    "NaN guard": ((Guarded(True), X), (Guarded(False), X), True),
    "clamp of infinite values": ((Clamped(False), X), (Clamped(True), X), True),
    "self loops": ((Graph(), (X, ENDS)), (Convolved(Graph()), (X, Graph().edges(ENDS))), True),
    "loop until it is small": ((UntilSmall(None), X), (UntilSmall(3), X), True),
}


@pytest.mark.parametrize("name", WAYS)
def test_the_way_around_works_where_the_model_is_refused(name):
    refused, captured, trains = WAYS[name]
    with pytest.raises(UnsupportedOp, match="decides by the values"):
        capture(*refused)
    assert capture(*captured).num_ops > 0
    if trains:
        assert capture(*captured, train=True, loss=lambda y: y.sum()).num_ops > 0


def test_layers_that_are_dropped_at_random():
    speech = {"input_values": torch.zeros(1, 800)}

    def total(output):
        return output.last_hidden_state.sum()

    with pytest.raises(UnsupportedOp, match="decides by the values"):
        capture(wav2vec2(0.1), speech, train=True, loss=total)
    assert capture(wav2vec2(0.0), speech, train=True, loss=total).num_ops > 0
