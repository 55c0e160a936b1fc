"""Model -> Graph: one file per framework, loaded when it is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from roost import catalog
from roost.core.graph import Graph
from roost.errors import InputError


class FrontEnd(Protocol):
    """A front-end of an installed package: an entry point of the group `roost.frontends`."""

    suffixes: tuple[str, ...]  # of the files that it reads, such as (".tflite",)

    def read(self, source: str, *, train: bool, optimizer: str, **options: Any) -> Graph:
        """The graph of this file."""


def read(source: str, *, train: bool = False, optimizer: str = "sgd", **options: Any) -> Graph:
    """The graph of a model file, a folder, or `package.module:callable`; what it is called decides
    who reads it.

    `.onnx` and TensorFlow files describe what they describe: inference, or a step that was saved as
    one. Options are handed to the front-end that reads it.
    """
    path = Path(source)
    fixed = source.endswith((".onnx", ".pb")) or (path / "saved_model.pb").exists()
    if fixed and train:
        raise InputError(
            f"{source}: says itself whether it is inference or a step; training is for PyTorch "
            "models"
        )
    if source.endswith(".onnx"):
        from roost.frontends.onnx import Onnx

        return Onnx().read(path, **options)
    if source.endswith(".pb") or (path / "saved_model.pb").exists():
        from roost.frontends.tensorflow import Tensorflow

        return Tensorflow().read(path, **options)
    if path.name == "config.json" or (path / "config.json").exists():
        from roost.frontends.huggingface import Huggingface

        return Huggingface().read(path, train=train, optimizer=optimizer, **options)
    if source.endswith(".pt2") or ":" in source:
        from roost.frontends.torch import Torch

        return Torch().read(source, train=train, optimizer=optimizer, **options)
    if (reader := installed_reader(source)) is not None:
        return reader.read(source, train=train, optimizer=optimizer, **options)
    if path.exists():
        raise InputError(
            f"{source}: is no model; known are .onnx, .pt2, .pb, a SavedModel folder, a config.json"
        )
    raise InputError(f"{source}: no such file, and no package.module:callable either")


def installed_reader(source: str) -> FrontEnd | None:
    """The front-end of an installed package that reads this file."""
    for point in catalog.entry_points("frontends"):
        reader: FrontEnd = catalog.find("frontends", point.name)()
        if source.endswith(reader.suffixes):
            return reader
    return None
