"""Files: what is saved is what is loaded, whole or not at all, and a bad one gets a clear error."""

import errno
import gzip
import json
import os
import time
from pathlib import Path

import jsonschema
import numpy as np
import pytest

import roost
from roost.core import files, formats
from roost.errors import GraphError, InputError
from roost.testing.problems import training_like
from roost.testing.schemas import published


@pytest.fixture
def nouns(graph, cluster, problem, placement, result):
    full = roost.simulate(problem, placement, full=True)
    return {
        "graph.json": graph,
        "cluster.toml": cluster,
        "problem.json": problem,
        "placement.json": placement,
        "timeline.json": full,
        "trial.json": result.best,
        "result.json": result,
        "costs.npz": problem.costs,
    }


def test_every_noun_comes_back_the_same(nouns, tmp_path):
    for name, noun in nouns.items():
        noun_path = tmp_path / name
        formats.save(noun, noun_path)
        again = tmp_path / f"again_{name}"
        formats.save(roost.load(noun_path), again)
        assert again.read_bytes() == noun_path.read_bytes(), name


def test_gzip_by_suffix_gives_the_same_bytes_each_time(graph, tmp_path):
    one, two = tmp_path / "one.json.gz", tmp_path / "two.json.gz"
    graph.save(one)
    graph.save(two)
    assert one.read_bytes() == two.read_bytes()
    assert json.loads(gzip.decompress(one.read_bytes()))["name"] == "small"
    assert roost.load(one) == graph


def test_graph_fields_survive(graph, tmp_path):
    graph.save(tmp_path / "graph.json")
    loaded = roost.load(tmp_path / "graph.json")
    assert loaded.inputs_of(2).tolist() == [0, 1]
    assert loaded.inputs_of(4).tolist() == [1, 3]  # in the order the op takes them
    assert loaded.allowed[3] == ("cuda",)
    assert loaded.group.tolist() == [-1, -1, 0, 0, -1]
    assert loaded.digest == graph.digest


def test_files_match_their_published_schema(nouns):
    folder = Path(__file__).parents[2] / "docs" / "schemas"
    for name, text in published().items():
        assert (folder / name).read_bytes() == text, f"{name} is out of date: make schemas"
    for name, noun in nouns.items():
        if name.endswith(".json"):
            schema = json.loads((folder / name.replace(".json", ".schema.json")).read_bytes())
            jsonschema.validate(json.loads(formats.encode(noun)), schema)


def test_a_schema_refuses_what_the_loader_refuses(graph):
    schema = json.loads(published()["graph.schema.json"])
    content = json.loads(formats.encode(graph))
    content["ops"][0]["flop"] = -1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, schema)


def test_a_hundred_thousand_ops_take_about_two_cpu_seconds(tmp_path):
    # A generous limit: this is a check for accidents such as a quadratic loop, not a benchmark.
    graph = training_like(100_000, 2).graph
    begin = time.process_time()
    graph.save(tmp_path / "graph.json")
    assert roost.load(tmp_path / "graph.json").num_ops == graph.num_ops
    assert time.process_time() - begin < 20


# Whole or not at all
# ----------------------------------------------------------------------------------------------


def test_a_full_disk_leaves_the_old_file(graph, tmp_path, monkeypatch):
    path = tmp_path / "graph.json"
    path.write_text("old")

    def full(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        InputError, match=r"graph\.json: cannot be written: No space left on device"
    ):
        graph.save(path)
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["graph.json"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_a_device_that_is_always_full(graph, tmp_path):
    (tmp_path / "graph.json").symlink_to("/dev/full")
    with pytest.raises(InputError, match="No space left on device"):
        graph.save(tmp_path / "graph.json")


def test_a_symlink_is_written_through(graph, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "target.json")
    graph.save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert roost.load(tmp_path / "target.json") == graph


def test_the_folder_that_a_symlink_leads_to_is_named(graph, tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "none" / "target.json")
    with pytest.raises(InputError, match=r"folder .*none does not exist"):
        graph.save(tmp_path / "link.json")


def test_the_mode_of_an_old_file_is_kept(graph, tmp_path):
    path = tmp_path / "graph.json"
    path.write_text("old")
    path.chmod(0o640)
    graph.save(path)
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/graph.json", "folder .* does not exist"),
        ("folder.json", "is a directory"),
        ("graph.toml", "saved as .json"),
        ("bad\0name.json", "cannot be written"),
    ],
)
def test_where_a_graph_cannot_be_saved(graph, tmp_path, name, message):
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(InputError, match=message):
        graph.save(tmp_path / name)


# Bad files
# --------------------------------------------------------------------------------------------------------


def spoil(graph, change):
    content = json.loads(formats.encode(graph))
    change(content)
    return json.dumps(content).encode()


BAD_GRAPHS = {
    "truncated": (lambda data: data[: len(data) // 2], "is not whole JSON"),
    "empty": (lambda data: b"", "is not whole JSON"),
    "not json": (lambda data: b"hello", "is not whole JSON"),
    "not utf-8": (lambda data: data.replace(b"small", b"sm\xff\xfell"), "UTF-8|not whole JSON"),
    "nan": (lambda data: data.replace(b"1000000000.0", b"NaN"), "is not whole JSON"),
    "infinite": (lambda data: data.replace(b"1000000000.0", b"1e999"), "(?i)out of range"),
    "deep": (lambda data: b"[" * 100_000, "nested too deeply|not whole JSON|Expected"),
    "a list": (lambda data: b"[]", "Expected object"),
}

BAD_FIELDS = {
    "wrong version": (lambda c: c.update(version=2), "version: roost.graph 2 is not known"),
    "no version": (lambda c: c.pop("version"), "missing required field version"),
    "unknown format": (lambda c: c.update(format="roost.grap"), "format: 'roost.grap' is none of"),
    "no ops": (lambda c: c.update(ops=[]), "has no ops"),
    "unknown field": (
        lambda c: c["ops"][2].update(flops=3),
        r"ops\[2\]: Object contains unknown field flops",
    ),
    "text for a number": (
        lambda c: c["ops"][2].update(flop="many"),
        r"ops\[2\].flop: Expected float, got str",
    ),
    "negative": (
        lambda c: c["ops"][2].update(output_bytes=-5),
        r"ops\[2\].output_bytes: Expected int >= 0",
    ),
    "huge": (lambda c: c["ops"][2].update(output_bytes=2**62), "add up to more than"),
    "too huge": (lambda c: c["ops"][2].update(output_bytes=2**80), r"ops\[2\].output_bytes"),
    "phase": (
        lambda c: c["ops"][2].update(phase="sideways"),
        r"ops\[2\].phase: 'sideways' is none of parameter",
    ),
    "duplicate name": (lambda c: c["ops"][3].update(name="a"), "two ops are called 'a'"),
    "empty name": (lambda c: c["ops"][0].update(name=""), "empty name|no op of this graph"),
    "dangling": (
        lambda c: c["ops"][2].update(inputs=["y"]),
        r"ops\[2\].inputs: op 'a' takes 'y', which is no op",
    ),
    "self": (lambda c: c["ops"][2].update(inputs=["a"]), "op 'a' takes its own output"),
    "cycle": (
        lambda c: c["ops"][2].update(inputs=["b"]),
        "cycle: 'a' -> 'b' -> 'a'|cycle: 'b' -> 'a' -> 'b'",
    ),
    "order": (lambda c: c["ops"].reverse(), "comes before its input .* inputs first"),
    "fed parameter": (lambda c: c["ops"][1].update(inputs=["x"]), "parameter 'w' has inputs"),
}


@pytest.mark.parametrize("case", BAD_GRAPHS)
def test_a_damaged_graph_is_refused(graph, tmp_path, case):
    damage, message = BAD_GRAPHS[case]
    path = tmp_path / "graph.json"
    path.write_bytes(damage(formats.encode(graph)))
    with pytest.raises(InputError, match=message) as caught:
        roost.load(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize("case", BAD_FIELDS)
def test_a_wrong_field_is_named(graph, tmp_path, case):
    change, message = BAD_FIELDS[case]
    path = tmp_path / "graph.json"
    path.write_bytes(spoil(graph, change))
    with pytest.raises(InputError, match=message) as caught:
        roost.load(path)
    assert str(caught.value).startswith(str(path))


def test_a_cycle_is_a_graph_error_that_names_the_ops_on_it():
    rows = [{"name": f"op{i}", "inputs": [f"op{(i + 1) % 4}"]} for i in range(4)]
    rows.append({"name": "beside", "inputs": ["op0"]})
    text = json.dumps({"format": "roost.graph", "version": 1, "name": "ring", "ops": rows}).encode()
    with pytest.raises(GraphError, match="cycle") as caught:
        formats.decode(text, "ring.json")
    assert all(f"'op{i}'" in str(caught.value) for i in range(4))
    assert "beside" not in str(caught.value)


def test_a_missing_file_a_folder_and_a_damaged_gzip(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        roost.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="is a directory"):
        roost.load(tmp_path)
    (tmp_path / "bad.json.gz").write_bytes(b"\x1f\x8b\x08\x00garbage")
    with pytest.raises(InputError, match="damaged gzip"):
        roost.load(tmp_path / "bad.json.gz")
    (tmp_path / "plain.json.gz").write_bytes(b"{}")
    with pytest.raises(InputError, match="damaged gzip"):
        roost.load(tmp_path / "plain.json.gz")


def test_a_small_gzip_that_unpacks_to_too_much(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 5000))
    with pytest.raises(InputError, match="holds more than 1000 bytes"):
        roost.load(tmp_path / "bomb.json.gz")


def test_costs_that_hold_objects_are_refused(tmp_path):
    path = tmp_path / "costs.npz"
    np.savez(path, format="roost.costs", version=1, source="x", op_time=np.array([object()]))
    with pytest.raises(InputError, match="is not a costs file"):
        roost.load(path)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"op_time": [[1.0, np.nan]]}, "is nan; it must be finite"),
        ({"op_time": [[1.0, -1.0]]}, "is -1.0"),
        ({"op_time": [1.0]}, r"must be \[ops, devices\]"),
        ({"op_time": [["a"]]}, "op_time"),
        ({"op_time": [[1.0]], "format": "other"}, "is not roost.costs 1"),
        ({}, "op_time"),
    ],
)
def test_bad_costs(tmp_path, columns, message):
    path = tmp_path / "costs.npz"
    np.savez(path, **({"format": "roost.costs", "version": 1, "source": "x"} | columns))
    with pytest.raises(InputError, match=message):
        roost.load(path)


BAD_CLUSTERS = {
    "not toml": ("devices = [", "is not TOML"),
    "no devices": ("devices = []", "has no devices"),
    "bad size": (
        '[[devices]]\nname="a"\nkind="cpu"\nmemory="12 gigs"',
        r"devices\[0\].memory: cannot read '12 gigs'",
    ),
    "negative": ('[[devices]]\nname="a"\nkind="cpu"\nmemory=-1', r"devices\[0\].memory: -1"),
    "nan": ('[[devices]]\nname="a"\nkind="cpu"\nmemory=nan', r"devices\[0\].memory: nan"),
    "infinite": ('[[devices]]\nname="a"\nkind="cpu"\nmemory=inf', r"devices\[0\].memory: inf"),
    "no name": ('[[devices]]\nkind="cpu"\nmemory=1', r"devices\[0\]: give either name, or names"),
    "same names": ('[[devices]]\nnames=["a","a"]\nkind="cpu"\nmemory=1', "called 'a'"),
    "no link": ('[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1', "no link from 'a' to 'b'"),
    "link to nowhere": (
        '[[devices]]\nnames=["cpu","gpu"]\nkind="cpu"\nmemory=1\n[[links]]\nbetween=["cpu","gpus"]\nbandwidth=1',
        "no device .for a link of cluster 'c'. called 'gpus'; did you mean 'gpu'",
    ),
    "no bandwidth": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n[[links]]\nbetween=["a","b"]\nbandwidth=0',
        "must be above zero",
    ),
    "sends faster than fetches": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n'
        '[[links]]\nbetween=["a","b"]\nbandwidth=1\nsend_bandwidth=2',
        "send_bandwidth of link 'a' to 'b', 2 B/s, is above its bandwidth, 1 B/s",
    ),
    "sends that take nothing": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n'
        '[[links]]\nbetween=["a","b"]\nbandwidth=1\nsend_bandwidth=-1',
        r"links\[0\].send_bandwidth: -1",
    ),
    "sends sooner than fetches": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n'
        '[[links]]\nbetween=["a","b"]\nbandwidth=1\nlatency=2\nsend_latency=1',
        "send_latency of link 'a' to 'b', 1 s, is below its latency, 2 s",
    ),
    "a sender that is never busy": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n[[links]]\nbetween=["a","b"]\nbandwidth=1\nsender_busy=-1',
        r"links\[0\].sender_busy: -1",
    ),
    "a receiver that is busy for ever": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n'
        '[[links]]\nbetween=["a","b"]\nbandwidth=1\nreceiver_busy=1e20',
        "receiver_busy of link 'a' to 'b' takes 1e\\+20 s; the limit is",
    ),
    "one end": (
        '[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n[[links]]\nbetween=["a"]\nbandwidth=1',
        r"links\[0\]: give between",
    ),
    "broadcast without a bus": (
        'broadcast=true\n[[devices]]\nnames=["a","b","c"]\nkind="cpu"\nmemory=1\n'
        '[[links]]\nbetween=["*","*"]\nbandwidth=1',
        "must share a bus",
    ),
    "too many": (
        f"[[devices]]\nnames={[str(i) for i in range(65)]}\nkind='cpu'\nmemory=1\n"
        "[[links]]\nbetween=['*','*']\nbandwidth=1",
        "65 devices; the limit is 64",
    ),
}


@pytest.mark.parametrize("case", BAD_CLUSTERS)
def test_a_bad_cluster_is_refused(tmp_path, case):
    text, message = BAD_CLUSTERS[case]
    path = tmp_path / "cluster.toml"
    path.write_text(f'format = "roost.cluster"\nversion = 1\nname = "c"\n{text}\n')
    with pytest.raises(InputError, match=message) as caught:
        roost.cluster(path)
    assert str(caught.value).startswith(str(path))


def test_a_bus_name_cannot_reach_into_objects(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(
        'format = "roost.cluster"\nversion = 1\nname = "c"\n[[devices]]\nnames=["a","b"]\nkind="cpu"\nmemory=1\n'
        '[[links]]\nbetween=["a","b"]\nbandwidth=1\nbus="{source.__class__}"\n'
    )
    assert roost.cluster(path).bus_names == ("{source.__class__}",)


def test_a_trial_whose_placement_was_changed_is_refused(result):
    content = json.loads(formats.encode(result))
    content["best"]["placement"]["device"][0] = 1
    with pytest.raises(InputError, match="digest"):
        formats.decode(json.dumps(content).encode(), "result.json")


def test_a_file_without_permission_is_told(graph, tmp_path, monkeypatch):
    """Root may read and write anything, so that it may not is said in its place."""
    path = tmp_path / "graph.json"
    graph.save(path)

    def closed(*args, **settings):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", closed)
        with pytest.raises(InputError, match=r"graph\.json: cannot be read: Permission denied"):
            roost.load(path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", closed)
        with pytest.raises(InputError, match=r"graph\.json: cannot be written: Permission denied"):
            graph.save(path)
    assert path.read_bytes() == before


def test_whether_a_file_can_be_written_is_known_before(tmp_path, monkeypatch):
    files.check_writable(tmp_path / "new.json")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.json").symlink_to(tmp_path / "none" / "x.json")
    for name, said in (
        ("folder", "is a directory; name a file in it"),
        ("none/x.json", r"folder .*none does not exist"),
        ("link.json", r"folder .*none does not exist"),
    ):
        with pytest.raises(InputError, match=said):
            files.check_writable(tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "link.json"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(InputError, match=r"new\.json: cannot be written: Permission denied"):
        files.check_writable(tmp_path / "new.json")


def test_a_field_that_is_not_known_is_told_with_the_nearest(tmp_path):
    path = tmp_path / "cluster.toml"
    roost.cluster("k80x2").save(path)
    path.write_text(path.read_text().replace("\nbandwidth = ", "\nbandwith = ", 1))
    with pytest.raises(InputError, match=r"unknown field bandwith; did you mean bandwidth\?"):
        roost.load(path)
    path.write_text("nothing_like_it = 1\n" + path.read_text())
    with pytest.raises(InputError, match=r"unknown field nothing_like_it$"):
        roost.load(path)
