"""Models that do something to their gradients, buffers or inputs that a careless capture would get
wrong."""

import torch
from torch import nn


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(()))


class NoGrad(Base):
    def forward(self, x):
        with torch.no_grad():
            target = self.layer(x)
        return (self.layer(x) - target * 0.5).square().mean()


class InferenceMode(Base):
    def forward(self, x):
        with torch.inference_mode():
            target = self.layer(x)
        return (self.layer(x) - target * 0.5).square().mean()


class Data(Base):
    def forward(self, x):
        return (self.layer(x) - self.layer(x).data * 0.5).square().mean()


class Slices(Base):
    def forward(self, x):
        rows = torch.zeros(4, 8)
        for row in range(4):
            rows[row] = self.layer(x[row])
        rows = rows * 1
        rows[:, 0] += 1
        return rows.square().mean()


class ChangesItsInput(Base):
    def forward(self, x):
        x.mul_(2)
        return self.layer(x).square().mean()


class Counts(Base):
    def forward(self, x):
        self.count += 1
        return (self.layer(x) * self.count).square().mean()


class SpectralNorm(Base):
    def __init__(self):
        super().__init__()
        self.layer = nn.utils.spectral_norm(self.layer)

    def forward(self, x):
        return self.layer(x).square().mean()


class Encoder(nn.Module):
    def __init__(self, batch_first):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=batch_first)

    def forward(self, x):
        return self.encoder(x[None].expand(3, 4, 8)).square().mean()


class BatchFirst(Encoder):
    def __init__(self):
        super().__init__(True)


class LengthFirst(Encoder):
    def __init__(self):
        super().__init__(False)


class ChangesItsWeight(Base):
    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(0.9)
            self.count.add_(1)
        return self.layer(x) * self.count


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 7


class OwnDerivative(Base):
    def forward(self, x):
        return Sevenfold.apply(self.layer(x)).sum()


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, times):
        ctx.save_for_backward(x)
        ctx.times = times
        return torch.nn.functional.linear(x, weight) * times, x.sum()

    @staticmethod
    def backward(ctx, gradient, of_sum):
        (x,) = ctx.saved_tensors
        return gradient * ctx.times + of_sum * 3, gradient.T @ x, None


class OwnDerivativeOfTwo(Base):
    def forward(self, x):
        product, total = Scaled.apply(self.layer(x), self.layer.weight, 2.0)
        return product.square().sum() + total


class Checkpoint(Base):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.layer, x, use_reentrant=True).sum()


class UnseenWeight(Base):
    def forward(self, x):
        weight = self.layer.weight

        class Unseen(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x @ weight

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        return Unseen.apply(self.layer(x)).sum()


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class ChangesWhatItIsGiven(Base):
    def forward(self, x):
        return InPlace.apply(self.layer(x)).sum()


class TensorHook(Base):
    def forward(self, x):
        y = self.layer(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 10)
        return y.sum()


class PicksRows(Base):
    def forward(self, x):
        return self.layer(x[x[:, 0] > 0]).sum()


RIGHT = [
    NoGrad,
    InferenceMode,
    Data,
    Slices,
    ChangesItsInput,
    Counts,
    SpectralNorm,
    BatchFirst,
    LengthFirst,
    OwnDerivative,
    OwnDerivativeOfTwo,
]
