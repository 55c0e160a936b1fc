"""Weights that come back as they were saved, and files that are refused with the file, the tensor
and the fix."""

import json
import os

import numpy as np
import pytest
from safetensors.numpy import save

from roost.errors import InputError
from roost.policies.weights import FORMAT, VERSION, load_weights, save_weights

SHAPES = {"a": (2, 3), "b": (4,)}


def tensors():
    return {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float32)}


def header(**changed):
    return {
        "roost": json.dumps(
            {"format": FORMAT, "version": VERSION, "policy": "mine", "card": {}} | changed
        )
    }


def written(path, given=None, **changed):
    path.write_bytes(save(tensors() if given is None else given, header(**changed)))
    return path


def test_what_is_saved_comes_back(tmp_path):
    path = tmp_path / "policy.safetensors"
    save_weights(path, "mine", tensors(), {"seed": 3, "family": "cifar10"})
    read, card = load_weights(path, "mine", SHAPES)
    assert card == {"seed": 3, "family": "cifar10"}
    assert sorted(read) == ["a", "b"]
    assert all((read[name] == tensors()[name]).all() for name in read)


def test_equal_weights_give_equal_files(tmp_path):
    for name in "xy":
        save_weights(tmp_path / name, "mine", tensors(), {"seed": 3})
    assert (tmp_path / "x").read_bytes() == (tmp_path / "y").read_bytes()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"format": "other"}, "format is 'other'"),
        ({"version": 99}, "version is 99"),
        ({"policy": "theirs"}, "policy is 'theirs', not 'mine'"),
        ({"card": []}, "card is no table"),
    ],
)
def test_another_header_is_refused(tmp_path, changed, said):
    path = written(tmp_path / "p.safetensors", **changed)
    with pytest.raises(InputError, match=said) as error:
        load_weights(path, "mine", SHAPES)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"a": None}, "tensor 'a' is missing"),
        ({"c": np.ones(1, np.float32)}, "a tensor 'c' that mine does not know"),
        ({"b": np.ones(5, np.float32)}, r"tensor 'b' has shape \[5\], not \[4\]"),
        ({"b": np.ones(4, np.float64)}, "tensor 'b' is float64"),
        (
            {"b": np.array([1, np.nan, 1, 1], np.float32)},
            "tensor 'b' has a number that is not finite",
        ),
    ],
)
def test_other_tensors_are_refused(tmp_path, changed, said):
    given = {name: tensor for name, tensor in (tensors() | changed).items() if tensor is not None}
    path = written(tmp_path / "p.safetensors", given)
    with pytest.raises(InputError, match=said) as error:
        load_weights(path, "mine", SHAPES)
    assert str(path) in str(error.value)
    assert "roost learn" in str(error.value)


@pytest.mark.parametrize(
    "data", [b"", b"{}", b"\xff" * 40, b"\x02" + b"\0" * 7 + b"[]", b"\x80\x04pickle" * 20]
)
def test_what_is_no_safetensors_file_is_refused(tmp_path, data):
    path = tmp_path / "p.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match="no safetensors file"):
        load_weights(path, "mine", SHAPES)


def test_a_file_cut_short_is_refused(tmp_path):
    path = written(tmp_path / "p.safetensors")
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(InputError, match="no safetensors file"):
        load_weights(path, "mine", SHAPES)


@pytest.mark.parametrize("about", [3, {"roost": "{"}, {"roost": "[]"}, {"roost": 3}])
def test_a_header_that_is_no_table_is_refused(tmp_path, about):
    text = json.dumps({"__metadata__": about}).encode()
    path = tmp_path / "p.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(InputError, match="no safetensors file"):
        load_weights(path, "mine", SHAPES)


@pytest.mark.parametrize("kind", ["BF16", "F8_E4M3"])
def test_a_type_that_numpy_has_not_is_refused(tmp_path, kind):
    size = {"BF16": 2}.get(kind, 1)
    table = {
        "__metadata__": header(),
        "a": {"dtype": kind, "shape": [1], "data_offsets": [0, size]},
    }
    text = json.dumps(table).encode()
    path = tmp_path / "p.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(size))
    with pytest.raises(
        InputError, match=f"p.safetensors: has tensors of type '{kind}', not float32"
    ):
        load_weights(path, "mine", SHAPES)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        load_weights(tmp_path / "none", "mine", SHAPES)


def test_weights_that_are_not_finite_are_not_saved(tmp_path):
    with pytest.raises(InputError, match="tensor 'a' is not finite"):
        save_weights(tmp_path / "p", "mine", {"a": np.array([np.inf])}, {})
    assert not (tmp_path / "p").exists()


def test_a_pipe_is_not_waited_for_and_a_folder_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: is no plain file"):
        load_weights(tmp_path / "pipe", "mine", SHAPES)
    with pytest.raises(InputError, match="is a directory"):
        load_weights(tmp_path, "mine", SHAPES)
    with pytest.raises(InputError, match="cannot be read"):
        load_weights(tmp_path / ("x" * 300), "mine", SHAPES)
