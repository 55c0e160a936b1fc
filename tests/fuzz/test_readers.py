"""Whatever a file holds, its reader gives a noun or an InputError, soon and in little memory.

`make fuzz` runs these tests.

FUZZ_INPUTS is the number of changed files in all; each reader gets a share.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import roost
from roost.core import formats
from roost.core.states import read_state, write_state
from roost.errors import InputError
from roost.policies.weights import load_weights, save_weights
from roost.search.journal_lines import RoundLine, array_rows, rows_digest, state_of
from roost.search.solve import search
from roost.testing.problems import training_like
from support.nasty import nasty

pytestmark = pytest.mark.slow

INPUTS = int(os.environ.get("FUZZ_INPUTS", "2000"))
MOST_SECONDS = 10.0  # for one file
MOST_MEMORY = 2**30  # bytes above those before, for one file
SHAPES = {"a": (3, 2), "b": (4,)}

# Pieces that mean something in one of the formats.
TOKENS = [
    *(b'"', b"[", b"]", b"{", b"}", b",", b":", b"-", b"null", b"true", b"1e400", b"NaN", b"-1"),
    *(b"9" * 400, b"[" * 3000, b'{"a":' * 3000, b"\xff\xfe", b"\x00" * 9, b"\n", b"12GiB"),
    *(b"4294967296", b"9223372036854775808", b"\x7f\xff\xff\xff\xff\xff\xff\xff", b"PK\x03\x04"),
]
CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["cut", "drop", "repeat", "flip", "token", "move"]),
        st.floats(0, 1),
        st.integers(1, 64),
        st.one_of(st.sampled_from(TOKENS), st.binary(min_size=1, max_size=8)),
    ),
    min_size=1,
    max_size=5,
)


def changed(data: bytes, changes: list[tuple[str, float, int, bytes]]) -> bytes:
    """The bytes after some changes, each at a place that is a share of the length."""
    for kind, share, length, piece in changes:
        at = int(share * len(data))
        if kind == "cut":
            data = data[:at]
        elif kind == "drop":
            data = data[:at] + data[at + length :]
        elif kind == "repeat":
            data = data[: at + length] + data[at:]
        elif kind == "flip":
            data = data[:at] + bytes([length]) + data[at + 1 :]
        elif kind == "move":
            data = data[at:] + data[:at] if length == 1 else data[at : at + length] + data
        else:
            data = data[:at] + piece + data[at + len(piece) * (length % 2) :]
    return data


def memory(field: str) -> int:
    """Bytes of this process: `VmRSS`, those it holds, or `VmHWM`, the most it held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


@contextmanager
def within_limits() -> Iterator[None]:
    """Fail if the work takes too long or too much memory."""
    Path("/proc/self/clear_refs").write_text("5")  # the most begins with what is held now
    before = memory("VmRSS")
    began = time.monotonic()
    yield
    assert time.monotonic() - began < MOST_SECONDS
    assert memory("VmHWM") - before < MOST_MEMORY


def test_the_limits_of_one_file_hold() -> None:
    """A passing peak counts, though its memory is given back."""
    for _ in range(2):
        with pytest.raises(AssertionError), within_limits():
            np.ones(MOST_MEMORY + 2**26, np.uint8).sum()
    with within_limits():
        np.ones(2**26, np.uint8).sum()


def no_traceback(
    name: str, data: bytes, read: Callable[[Path], Any], folder: Path, share: float
) -> None:
    """Read many changed copies of a file. Only InputError may come of it, within the limits."""
    path = folder / name
    path.write_bytes(data)
    read(path)  # imports and compiled loops are no cost of a changed file

    @settings(
        max_examples=max(1, int(share * INPUTS)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(CHANGES)
    def check(changes: list[tuple[str, float, int, bytes]]) -> None:
        path.write_bytes(changed(data, changes))
        with within_limits():
            try:
                read(path)
            except InputError as error:
                assert len(str(error)) < 3000  # noqa: PT017

    check()


def samples() -> dict[str, bytes]:
    """Files of every noun, by name."""
    problem, placement = nasty(11)
    full = roost.simulate(problem, placement, full=True)
    trial = roost.Trial(placement, full.step_time, full.peak_memory, full.feasible)
    result = roost.Result(trial, "by hand", 0, 1, 0.0, {"same": trial}, roost.Bound(0.0, "none"))
    nouns = {"problem": problem, "graph": problem.graph, "placement": placement}
    nouns |= {"timeline": full, "trial": trial, "result": result}
    return {f"{name}.json": formats.encode(noun) for name, noun in nouns.items()}


@pytest.mark.parametrize("name", sorted(samples()))
def test_nouns(name: str, tmp_path: Path) -> None:
    no_traceback(name, samples()[name], roost.load, tmp_path, 0.1)


def test_clusters(tmp_path: Path) -> None:
    roost.cluster("k80x2").save(tmp_path / "mine.toml")
    data = (tmp_path / "mine.toml").read_bytes()
    no_traceback("mine.toml", data, roost.load, tmp_path, 0.05)


def test_compressed_files(tmp_path: Path) -> None:
    nasty(11)[0].save(tmp_path / "problem.json.gz")
    data = (tmp_path / "problem.json.gz").read_bytes()
    no_traceback("problem.json.gz", data, roost.load, tmp_path, 0.05)


def test_costs(tmp_path: Path) -> None:
    nasty(11)[0].costs.save(tmp_path / "costs.npz")
    data = (tmp_path / "costs.npz").read_bytes()
    no_traceback("costs.npz", data, roost.load, tmp_path, 0.05)


def test_weights(tmp_path: Path) -> None:
    tensors = {name: np.ones(shape, np.float32) for name, shape in SHAPES.items()}
    save_weights(tmp_path / "w.safetensors", "mine", tensors, {})
    data = (tmp_path / "w.safetensors").read_bytes()

    def read(path: Path) -> None:
        load_weights(path, "mine", SHAPES)

    no_traceback("w.safetensors", data, read, tmp_path, 0.05)


def test_states(tmp_path: Path) -> None:
    write_state(tmp_path / "s.npz", {"a": np.arange(4), "b": np.ones((2, 2))})
    data = (tmp_path / "s.npz").read_bytes()

    def read(path: Path) -> None:
        try:
            read_state(path)
        except ValueError as error:
            raise InputError(str(error)[:1000]) from None

    no_traceback("s.npz", data, read, tmp_path, 0.05)


@pytest.mark.parametrize("placer", ["single", "annealing"])
def test_journals(tmp_path: Path, placer: str) -> None:
    problem = training_like(12, 2)
    path = tmp_path / "trials.jsonl"
    search(problem, placer, trials=60, journal=path, prove=False)

    def read(path: Path) -> None:
        search(problem, placer, trials=60, journal=path, prove=False)

    no_traceback("trials.jsonl", path.read_bytes(), read, tmp_path, 0.03)


def test_states_of_rounds_with_a_true_digest(tmp_path: Path) -> None:
    """The digest of a forged state is worked out again: only its arrays are wrong."""
    problem = training_like(12, 2)
    path = tmp_path / "trials.jsonl"
    search(problem, "annealing", trials=600, journal=path, prove=False)
    lines = path.read_bytes().splitlines()
    number = next(i for i, line in enumerate(lines) if b'"0.placed"' in line)
    row = msgspec.json.decode(lines[number], type=RoundLine)
    state = state_of(row)
    names = sorted(state)

    @settings(
        max_examples=max(1, int(0.02 * INPUTS)),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.sampled_from(names), st.integers(0, 10**6), st.integers(-(2**63), 2**63 - 1))
    def check(name: str, at: int, value: int) -> None:
        array = np.array(state[name])
        words = array.reshape(-1).view(f"i{array.dtype.itemsize}")
        words[at % len(words)] = np.int64(value).astype(words.dtype)
        row.state = array_rows(state | {name: array})
        row.digest = rows_digest(row.state)
        changed_lines = [*lines[:number], msgspec.json.encode(row), *lines[number + 1 :], b""]
        path.write_bytes(b"\n".join(changed_lines))
        with within_limits():
            try:
                search(problem, "annealing", trials=600, journal=path, prove=False)
            except InputError as error:
                assert "trials.jsonl" in str(error)  # noqa: PT017

    check()


def test_onnx(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx import helper

    from roost.frontends.onnx import Onnx

    def tensor(name: str) -> Any:
        return helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [4, 4])

    weight = helper.make_tensor("w", onnx.TensorProto.FLOAT, [4, 4], np.ones(16).tolist())
    axes = helper.make_tensor("axes", onnx.TensorProto.INT64, [2], [1, 4])
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="product"),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Softmax", ["r"], ["s"], axis=-1),
        helper.make_node("Expand", ["s", "axes"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "tiny", [tensor("x")], [tensor("y")], [weight, axes])
    data = helper.make_model(graph).SerializeToString()
    no_traceback("tiny.onnx", data, Onnx().read, tmp_path, 0.1)


def test_configs(tmp_path: Path) -> None:
    """The reading of a config, without the building of its model, which takes seconds."""
    transformers = pytest.importorskip("transformers")
    from roost.frontends.huggingface import Huggingface

    small = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = {"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}, **small}
    data = msgspec.json.encode(config | {"rope_scaling": {"rope_type": "default"}})

    def read(path: Path) -> None:
        Huggingface()._config(path, transformers)

    no_traceback("config.json", data, read, tmp_path, 0.02)
