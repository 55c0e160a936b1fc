"""Capture the test models that the `onnx` package ships; count refusals by cause.

    python benchmarks/onnx_tests.py [--list]

A model that is refused is tried again with the values of its small inputs, as
`--input NAME==VALUE` gives them: conditions, trip counts, axes and sizes.
"""

from __future__ import annotations

import argparse
import logging
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from roost.errors import RoostError
from roost.frontends.onnx import Onnx

CAUSES = {  # by the words of the error
    r"is not a tensor but a sequence": "an input is a sequence",
    r"is not a tensor but a map": "an input is a map",
    r"depends on data: its (trip count|condition)": "a loop's length depends on data",
    r"depends on data: its (split|position)": "a sequence's size depends on data",
    r"a Scan of opset 8": "a Scan of opset 8",
    r"the shape of .* does not follow": "a shape depends on data",
    r"the shapes of these inputs are not fixed": "an input shape is open",
}


@dataclass
class Counts:
    """The models of one collection, and those that were refused, by cause."""

    models: int = 0
    first: Counter[str] = field(default_factory=Counter)  # with the file alone
    refused: dict[str, tuple[str, str]] = field(default_factory=dict)  # with values too


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print every refused model")
    listed = parser.parse_args().list
    logging.disable()
    for collection, counts in (("data", count(data())), ("node", count(nodes()))):
        print(
            f"{collection}: {counts.models} models, {counts.first.total()} refused, "
            f"{len(counts.refused)} refused with values of inputs"
        )
        causes = Counter(cause for cause, _ in counts.refused.values())
        for cause, number in counts.first.most_common():
            print(f"  {number:4} {cause}; with values {causes[cause]}")
        for name, (_, message) in counts.refused.items() if listed else ():
            print(f"    {name}: {message}")


def data() -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """The model files that are in the package."""
    import onnx

    folder = Path(onnx.__file__).parent / "backend" / "test" / "data"
    for path in sorted(folder.rglob("*.onnx")):
        inputs = {}
        model = onnx.load_model(path, load_external_data=False)
        for number, entry in enumerate(model.graph.input):
            stored = path.parent / "test_data_set_0" / f"input_{number}.pb"
            if stored.exists() and entry.type.HasField("tensor_type"):
                tensor = onnx.TensorProto.FromString(stored.read_bytes())
                inputs[entry.name] = onnx.numpy_helper.to_array(tensor)
        yield str(path.relative_to(folder)), path.read_bytes(), inputs


def nodes() -> Iterator[tuple[str, bytes, dict[str, Any]]]:
    """The models of one node that the package makes, and their functions written out."""
    from onnx.backend.test.case.node import collect_testcases

    for case in collect_testcases(None):
        inputs = case.data_sets[0][0] if case.data_sets else ()
        names = [entry.name for entry in case.model.graph.input]
        yield case.name, case.model.SerializeToString(), dict(zip(names, inputs, strict=False))


def count(models: Iterator[tuple[str, bytes, dict[str, Any]]]) -> Counts:
    """Try every model with the file alone, then with the values of its small inputs."""
    counts = Counts()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "model.onnx"
        for name, content, inputs in models:
            path.write_bytes(content)
            counts.models += 1
            error = refusal(path, {})
            if error is None:
                continue
            counts.first[_cause(error)] += 1
            error = refusal(path, {n: np.asarray(v) for n, v in inputs.items() if _is_small(v)})
            if error is not None:
                counts.refused[name] = (_cause(error), error)
    return counts


def refusal(path: Path, inputs: dict[str, Any]) -> str | None:
    """The error of a capture; None if there is a graph."""
    try:
        Onnx().read(path, inputs=inputs)
    except RoostError as error:
        return str(error).removeprefix(f"{path}: ")
    return None


def _cause(error: str) -> str:
    return next((cause for words, cause in CAUSES.items() if re.search(words, error)), error)


def _is_small(value: Any) -> bool:
    known = isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf"
    return known and value.size <= 16


if __name__ == "__main__":
    main()
