"""A step as PyTorch runs it by itself."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from roost.errors import InputError
from roost.runtime.step.eager import eager_step_time

CPU = torch.device("cpu")


class Model(nn.Module):
    def __init__(self, wrap=lambda loss: loss):
        super().__init__()
        self.layer, self.wrap, self.calls = nn.Linear(4, 1), wrap, []

    def forward(self, x, scale=1.0):
        self.calls.append((self.training, torch.is_grad_enabled()))
        return self.wrap((self.layer(x) * scale).sum())


def test_inference_changes_nothing():
    model = Model()
    before = model.layer.weight.detach().clone()
    assert eager_step_time(model, (torch.ones(2, 4),), CPU, seconds=1e-4) > 0
    assert set(model.calls) == {(False, False)}
    assert len(model.calls) >= 4  # one that does not count, and three that do
    assert torch.equal(model.layer.weight, before)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw"])
def test_training_updates_the_weights_and_leaves_no_gradients(optimizer):
    model = Model()
    before = model.layer.weight.detach().clone()
    with torch.no_grad():  # as in a thread that times
        assert (
            eager_step_time(
                model, {"x": torch.ones(2, 4), "scale": 2.0}, CPU, optimizer, seconds=1e-4
            )
            > 0
        )
    assert set(model.calls) == {(True, True)}
    assert not torch.equal(model.layer.weight, before)
    assert model.layer.weight.grad is None


@pytest.mark.parametrize(
    "wrap",
    [lambda loss: {"loss": loss}, lambda loss: (loss, 3), lambda loss: SimpleNamespace(loss=loss)],
)
def test_the_loss_is_found(wrap):
    assert eager_step_time(Model(wrap), torch.ones(2, 4), CPU, "sgd", seconds=1e-4) > 0


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(InputError, match="no loss"):
        eager_step_time(Model(lambda loss: {"scores": loss}), torch.ones(2, 4), CPU, "sgd")
