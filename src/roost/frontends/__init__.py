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


_COMPLETE = ("onnx", "tensorflow")  # their files hold inference, or a whole training step


_RUN_CODE = ("torch", "tensorflow")  # opening a file of these can run code of its author


def read(
    source: str,
    *,
    train: bool = False,
    optimizer: str = "sgd",
    trust: bool = False,
    **options: Any,
) -> Graph:
    """The graph of a model file, a folder, or `package.module:callable`.

    The name decides which front-end reads it, and that front-end gets the options. `.onnx` and
    TensorFlow files hold inference or a whole step, so `train` is for the others. A `.pt2` file or
    a SavedModel folder can run code of its author: Roost refuses it without `trust`.
    """
    name = _own_reader(source)
    if name in _RUN_CODE:
        options["trust"] = trust
    if name in _COMPLETE:
        if train:
            raise InputError(
                f"{source}: the file holds inference or a whole step; training is for PyTorch "
                "models"
            )
        complete: Graph = catalog.find("frontends", name)().read(source, **options)
        return complete
    reader = catalog.find("frontends", name)() if name else installed_reader(source)
    if reader is not None:
        graph: Graph = reader.read(source, train=train, optimizer=optimizer, **options)
        return graph
    if Path(source).exists():
        raise InputError(
            f"{source}: is no model; known are .onnx, .pt2, .pb, a SavedModel folder, a config.json"
        )
    raise InputError(f"{source}: no such file, and no package.module:callable either")


def _own_reader(source: str) -> str:
    """The front-end of Roost for a source; "" for none."""
    path = Path(source)
    if source.endswith(".onnx"):
        return "onnx"
    if source.endswith(".pb") or (path / "saved_model.pb").exists():
        return "tensorflow"
    if path.name == "config.json" or (path / "config.json").exists():
        return "huggingface"
    return "torch" if source.endswith(".pt2") or ":" in source else ""


def installed_reader(source: str) -> FrontEnd | None:
    """The front-end of an installed package that reads this file."""
    for point in catalog.entry_points("frontends"):
        reader: FrontEnd = catalog.find("frontends", point.name)()
        if source.endswith(reader.suffixes):
            return reader
    return None
