"""Base classes of the settings of models. They import PyTorch only when a model is built."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, get_type_hints

from roost.errors import InputError, UnknownName

if TYPE_CHECKING:
    from torch import Tensor, nn

# Name of a published size -> its settings that differ from the defaults.
Sizes = Mapping[str, Mapping[str, Any]]
WORDS = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True)
class ModelSettings(ABC):
    """The settings of a model, checked when made. A number may be 0 only if 0 is its default."""

    SIZES: ClassVar[Sizes] = {}

    @abstractmethod
    def model(self) -> nn.Module:
        """The model with random weights, on PyTorch's current device; `meta` takes no memory.

        Its forward takes the tensors of `inputs`. It returns the loss if the targets are among
        them, else the output.
        """

    @abstractmethod
    def inputs(self, train: bool) -> tuple[Tensor, ...]:
        """Random inputs on PyTorch's current device, the targets last when training."""

    @classmethod
    def size(cls, name: str) -> Self:
        """The settings of a published size."""
        if name not in cls.SIZES:
            raise UnknownName(f"size of {cls.__name__.lower()}", name, cls.SIZES)
        return cls(**cls.SIZES[name])

    def __post_init__(self) -> None:
        types = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            _check(field, types[field.name], getattr(self, field.name))
        self.check()

    def check(self) -> None:  # noqa: B027  few models need it
        """Raise InputError if settings contradict each other."""

    def must_divide(self, part: str, whole: str) -> None:
        """Raise InputError unless one setting divides another."""
        small = getattr(self, part)
        large = getattr(self, whole)
        if large % small:
            raise InputError(f"{whole} is {large}; it must be a multiple of {part}, {small}")

    def must_not_exceed(self, less: str, more: str) -> None:
        """Raise InputError if one setting is larger than another."""
        small = getattr(self, less)
        large = getattr(self, more)
        if small > large:
            raise InputError(f"{less} is {small}; it must be at most {more}, {large}")

    def must_be_at_least(self, name: str, least: int) -> None:
        """Raise InputError if a setting is too small."""
        if getattr(self, name) < least:
            raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}")


class ImageSettings(ModelSettings):
    """Settings of a classifier of square images."""

    batch: int
    image: int
    classes: int

    def inputs(self, train: bool) -> tuple[Tensor, ...]:
        """Images, and their classes when training."""
        import torch

        images = torch.randn(self.batch, 3, self.image, self.image)
        return (images, torch.randint(self.classes, (self.batch,))) if train else (images,)


class LanguageSettings(ModelSettings):
    """Settings of a model that predicts the next word."""

    batch: int
    length: int
    vocab: int

    def inputs(self, train: bool) -> tuple[Tensor, ...]:
        """Words, and the words that follow them when training."""
        import torch

        shape = (self.batch, self.length)
        return tuple(torch.randint(self.vocab, shape) for _ in range(1 + train))


class TranslationSettings(ModelSettings):
    """Settings of a model that turns a sentence into another."""

    batch: int
    length: int
    target_length: int
    vocab: int

    def inputs(self, train: bool) -> tuple[Tensor, ...]:
        """Source words, the word before each target word, and the target words when training."""
        import torch

        lengths = (self.length, self.target_length, self.target_length)[: 2 + train]
        return tuple(torch.randint(self.vocab, (self.batch, length)) for length in lengths)


def _check(field: dataclasses.Field[Any], kind: Any, value: Any) -> None:
    if kind not in WORDS:
        return
    allowed = (int, float) if kind is float else (kind,)
    if not isinstance(value, allowed) or (kind is not bool and isinstance(value, bool)):
        raise InputError(f"{field.name} is {value!r}; it must be {WORDS[kind]}")
    if kind is bool:
        return
    can_be_off = field.default == 0
    if not math.isfinite(value) or value < 0 or (value == 0 and not can_be_off):
        raise InputError(
            f"{field.name} is {value!r}; it must be {'0 or more' if can_be_off else 'positive'}"
        )
    if field.name in ("dropout", "smoothing") and value >= 1:
        raise InputError(f"{field.name} is {value!r}; it must be less than 1")
