"""`roost export`: what it writes, and what it refuses."""

import json

import numpy as np
import pytest

from roost import zoo
from roost.core.cluster import Cluster, Device, Link
from roost.cost_models import estimate

SIZE = {
    "batch": 1,
    "length": 4,
    "layers": 4,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 2,
    "intermediate": 32,
    "vocab": 40,
}
SET = [text for key, value in SIZE.items() for text in ("--set", f"{key}={value}")]
FIGURES = {"peak": {"float32": 1e12}, "memory_bandwidth": 1e11}
LATE = ("layers.2", "layers.3", "norm", "output")


@pytest.fixture
def folder(tmp_path):
    names = ("cpu", "cuda:0", "cuda:1")
    devices = tuple(Device(name, name.partition(":")[0], 2**34, **FIGURES) for name in names)
    Cluster("mine", devices, (Link("*", "*", 1e9),)).save(tmp_path / "mine.toml")
    graph = zoo.build("llama", train=False, **SIZE)
    graph.save(tmp_path / "graph.json")
    problem = estimate(graph, Cluster("mine", devices, (Link("*", "*", 1e9),)))
    device = np.array([2 if module.startswith(LATE) else 1 for module in graph.modules])
    problem.placement(device).save(tmp_path / "placement.json")
    problem.placement(np.where([m.startswith("layers.1") for m in graph.modules], 2, 1)).save(
        tmp_path / "back.json"
    )
    return tmp_path


def args(folder, form, *more, model=False):
    source = ["llama", *SET] if model else [folder / "graph.json"]
    where = ["--on", folder / "mine.toml", "--placement", folder / "placement.json"]
    return ["export", *source, *where, "--format", form, *more]


@pytest.mark.parametrize("model", [True, False])
def test_a_device_map(roost, folder, model):
    result = roost(*args(folder, "device_map", model=model))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["layers.1"] == 0
    assert found["layers.2"] == found["output"] == 1
    assert "times as long" in result.stderr
    told = json.loads(roost(*args(folder, "device_map", "--json", model=model)).stdout)
    assert told["device_map"] == found
    assert told["cost"] == told["step_time"] / told["placed_time"]
    assert told["feasible"]


def test_a_file(roost, folder):
    result = roost(*args(folder, "device_map", "-o", folder / "map.json"))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert json.loads((folder / "map.json").read_text())["layers.3"] == 1


def test_where_it_cannot_be_written_is_told_before_anything_is_read(refused, folder):
    where = folder / "none" / "map.json"
    assert f"folder {folder / 'none'} does not exist" in refused(
        *args(folder, "device_map", "-o", where)
    )
    assert "does not exist" in refused(
        "export", "nothing.json", "--placement", "x", "--format", "split_spec", "-o", where
    )


def test_a_folder_of_place_is_enough(roost, folder):
    placed = roost(
        "place",
        folder / "graph.json",
        "--on",
        folder / "mine.toml",
        "--trials",
        9,
        "-o",
        folder / "out",
    )
    assert placed.exit_code == 0, placed.output
    result = roost("export", "llama", *SET, "--placement", folder / "out", "--format", "device_map")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)


def test_a_split_spec(roost, folder):
    found = json.loads(roost(*args(folder, "split_spec", "--json")).stdout)
    assert found["split_spec"] == {"layers.2": "BEGINNING"}
    assert found["devices"] == ["cuda:0", "cuda:1"]


def test_what_is_refused(refused, folder):
    assert "is no weight of a Llama" in refused(*args(folder, "llama_cpp"))
    back = args(folder, "split_spec")
    back[back.index("--placement") + 1] = folder / "back.json"
    assert "module 'layers.2' goes back to cuda:0 after cuda:1" in refused(*back)
    graph = folder / "graph.json"
    assert "--placement is missing" in refused(
        "export", graph, "--on", "h200", "--format", "device_map"
    )
    placed = ("--placement", folder / "placement.json")
    assert "--format is missing" in refused("export", graph, "--on", "h200", *placed)
    assert "placement.json: no device of cluster 'h200' called 'cpu'" in refused(
        "export", graph, "--on", "h200", *placed, "--format", "device_map"
    )
    assert "does not exist" in refused(
        *args(folder, "device_map", "-o", folder / "none" / "map.json")
    )


@pytest.mark.filterwarnings("ignore")
def test_a_hugging_face_config(roost, folder):
    pytest.importorskip("transformers", reason="needs the hf extra")
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "intermediate_size": 64,
    }
    config = {"model_type": "llama", "vocab_size": 50, "num_key_value_heads": 2} | small
    (folder / "config.json").write_text(json.dumps(config))
    model = (folder / "config.json", "--set", "length=8")
    captured = roost("capture", *model, "-o", folder / "hf.json", "--json")
    facts = json.loads(captured.stdout)
    from roost import load
    from roost.core.placement import Placement

    graph = load(folder / "hf.json")
    device = np.array(
        [
            2 if m.startswith(("model.layers.1", "model.norm", "lm_head")) else 1
            for m in graph.modules
        ]
    )
    Placement(device, devices=("cpu", "cuda:0", "cuda:1"), graph=facts["digest"]).save(
        folder / "hf_placement.json"
    )
    where = ("--on", folder / "mine.toml", "--placement", folder / "hf_placement.json")
    found = json.loads(roost("export", *model, *where, "--format", "device_map").stdout)
    assert found["model.layers.0"] == found["model.rotary_emb"] == 0
    assert found["model.layers.1"] == found["lm_head"] == 1
    line = roost("export", *model, *where, "--format", "llama_cpp").stdout
    assert line.startswith('-ngl 3 -ot "')
    assert r"^blk\.1\.=CUDA1" in line
