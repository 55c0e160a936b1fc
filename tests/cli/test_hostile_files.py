"""Files and settings made to break the command end in one short line."""

import gzip
import os

import pytest

from roost import load
from roost.errors import InputError, UnknownName
from roost.search.solve import search
from roost.testing.tiny_problems import tiny_problem


def test_a_pipe_as_a_graph_is_not_waited_for(refused, tmp_path):
    for name in ("graph.json", "graph.json.gz", "model.onnx", "model.pt2"):
        os.mkfifo(tmp_path / name)
        verb = ["simulate", tmp_path / name, "--on", "cpu"]
        assert name in refused(*verb)


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused_early(refused, tmp_path):
    path = tmp_path / "graph.json.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(70):
            file.write(bytes(2**20))
    assert path.stat().st_size < 2**20
    message = refused("simulate", path, "--on", "cpu")
    assert "graph.json.gz: holds more than 67108864 bytes, the limit" in message


@pytest.mark.parametrize(
    "text",
    [
        '{"format": "%s", "version": 1}',
        '{"format": "roost.graph", "version": 1, "%s": 1}',
        '{"format": "roost.graph", "version": 1, "name": "n", "ops": [{"name": "%s", "kind": "x", '
        '"inputs": ["y"]}]}',
    ],
)
def test_a_huge_name_makes_a_short_message(refused, tmp_path, text):
    path = tmp_path / "graph.json"
    path.write_text(text % ("x" * 5_000_000))
    assert 20 < len(refused("simulate", path, "--on", "cpu")) < 3000


def test_long_messages_keep_their_ends():
    error = InputError("first " + "x" * 10_000 + " last")
    assert str(error) == "first " + "x" * 80 + "..." + "x" * 80 + " last"
    assert len(str(InputError("word " * 10_000))) < 2100
    assert len(str(UnknownName("placer", "x" * 10**7, ["auto", "single"]))) < 2100
    assert str(InputError("as it is " * 100)) == "as it is " * 100


@pytest.mark.parametrize("columns", [0, 1])
def test_no_width_prints_all_the_same(roost, columns):
    assert "k80x4" in roost("clusters", "k80x4", columns=columns).stdout.replace("\n", "")
    assert roost("--help", columns=columns).stdout


def test_a_line_of_a_journal_that_is_nested_deep_is_refused(tmp_path):
    path, problem = tmp_path / "trials.jsonl", tiny_problem("chain")
    search(problem, "single", trials=20, journal=path, prove=False)
    with path.open("ab") as file:
        file.write(b'{"row":"trial","a":' + b"[" * 100_000 + b"\n")
    with pytest.raises(InputError, match=r"trials\.jsonl: line \d+: "):
        search(problem, "single", trials=20, journal=path, prove=False)


def test_a_graph_that_is_nested_deep_is_refused(tmp_path):
    path = tmp_path / "graph.json"
    path.write_text('{"a":' * 100_000)
    with pytest.raises(InputError, match=r"graph\.json: "):
        load(path)
