"""TensorFlow: a SavedModel folder, a frozen GraphDef, or a tf.function, to a Graph.

A process of its own (`_tensorflow_worker.py`) reads files, because PyTorch and TensorFlow disturb
each other in one process. Variables are parameters, functions are inlined, and loops and other
control flow are refused.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roost.core import formats
from roost.core.graph import Graph
from roost.errors import GraphError, InputError, MissingExtra, UnsupportedOp
from roost.frontends._trust import check_trust
from roost.frontends.tracing.tensors import Coverage

_ERRORS: dict[str, type[InputError]] = {
    error.__name__: error for error in (GraphError, UnsupportedOp)
}


@dataclass(frozen=True)
class Tensorflow:
    """Reads SavedModel folders and frozen GraphDefs."""

    suffixes = (".pb",)  # and folders with a saved_model.pb in them

    def read(
        self,
        source: str | Path,
        *,
        signature: str = "serving_default",
        inputs: Mapping[str, Sequence[int]] | None = None,
        name: str | None = None,
        trust: bool = False,
    ) -> Graph:
        """The graph of a signature of a SavedModel, or of all of a GraphDef.

        `inputs` gives the shapes of those inputs that the file leaves open, such as the batch.
        TensorFlow runs the initialisers of a SavedModel when it loads it: a folder needs `trust`.
        """
        return _read(source, signature, inputs, name, trust)[0]

    def coverage(
        self,
        source: str | Path,
        *,
        signature: str = "serving_default",
        inputs: Mapping[str, Sequence[int]] | None = None,
        trust: bool = False,
    ) -> Coverage:
        """The shares of a model's costs that come from formulas."""
        return _read(source, signature, inputs, None, trust)[1]


def capture_function(
    function: Any, *example_inputs: Any, name: str | None = None, **example_options: Any
) -> Graph:
    """The graph of one call of a tf.function, or of a Python function that TensorFlow can trace.

    The examples are tensors, arrays or `tf.TensorSpec`s; only shapes and types matter. A training
    step is a function that takes a batch, computes gradients with a tape and applies them. This
    runs in the caller's process, which uses TensorFlow already.
    """
    from roost.frontends import _tensorflow_graph, _tensorflow_worker

    tf = _tensorflow_worker.import_tensorflow()
    label = name or str(getattr(function, "__name__", "function")).strip("<>")
    try:
        if not hasattr(function, "captured_inputs"):  # not a concrete function yet
            traceable = (
                function if hasattr(function, "get_concrete_function") else tf.function(function)
            )
            function = traceable.get_concrete_function(*example_inputs, **example_options)
    except Exception as error:
        raise InputError(f"{label}: TensorFlow cannot trace this function: {error}") from error
    traced = _tensorflow_worker.traced_function(function, label)
    return _tensorflow_graph.describe(tf, traced, {}, label, label)[0]


def _read(
    source: str | Path,
    signature: str,
    inputs: Mapping[str, Sequence[int]] | None,
    name: str | None,
    trust: bool,
) -> tuple[Graph, Coverage]:
    path = _model_path(Path(source))
    if path.is_dir():
        check_trust(path, trust, "TensorFlow runs the initialisers of a SavedModel")
    if importlib.util.find_spec("tensorflow") is None:
        raise MissingExtra("tensorflow", "tf")
    options = json.dumps({"signature": signature, "inputs": dict(inputs or {}), "name": name})
    with tempfile.TemporaryDirectory(prefix="roost-") as folder:
        out = Path(folder) / "graph.json"
        answer = _ask_worker(str(path), options, str(out))
        return formats.load_as(Graph, out), Coverage(
            **answer | {"unknown_kinds": tuple(answer["unknown_kinds"])}
        )


def _model_path(path: Path) -> Path:
    if path.name == "saved_model.pb":
        path = path.parent
    if not path.exists():
        raise InputError(f"{path}: no such file or folder")
    if path.is_dir() and not (path / "saved_model.pb").is_file():
        raise InputError(
            f"{path}: is not a SavedModel, it has no saved_model.pb; make one with "
            "model.export(folder)"
        )
    if path.is_file() and path.suffix in (".keras", ".h5", ".hdf5"):
        raise InputError(
            f"{path}: is a Keras file; load it in Keras and make a SavedModel: model.export(folder)"
        )
    return path


def _ask_worker(source: str, options: str, out: str) -> dict[str, Any]:
    """Run the worker; return the coverage, or raise the error it reports."""
    # No GPU is needed to read a model, and none is taken.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    command = [sys.executable, "-m", "roost.frontends._tensorflow_worker", source, options, out]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | quiet, check=False
    )
    try:
        answer = json.loads(done.stdout.strip().splitlines()[-1])
        if "error" not in answer:
            return dict(answer["coverage"])
    except (IndexError, KeyError, TypeError, ValueError):
        last = " | ".join(done.stderr.strip().splitlines()[-3:])
        raise InputError(
            f"{source}: TensorFlow could not read it (exit {done.returncode}): {last}"
        ) from None
    if answer["error"] == "MissingExtra":
        raise MissingExtra("tensorflow", "tf")
    raise _ERRORS.get(answer["error"], InputError)(answer["message"])
