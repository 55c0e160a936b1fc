"""No model file runs code unless its reader trusts it."""

import contextlib
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile

import pytest
import torch

from roost.errors import InputError
from roost.frontends import read
from roost.frontends.tensorflow import Tensorflow
from roost.frontends.torch import Torch

pytestmark = pytest.mark.filterwarnings("ignore")


class Payload:
    """An object whose unpickling makes a file."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


def saved(payload):
    """A payload as torch.save writes it."""
    buffer = io.BytesIO()
    torch.save(payload, buffer)
    return buffer.getvalue()


def in_sample_inputs(entries, root, marker):
    (name,) = (name for name in entries if "sample_inputs" in name)
    entries[name] = saved(Payload(marker))


def in_weight(entries, root, marker):
    (name,) = (name for name in entries if name.endswith("weights_config.json"))
    config = json.loads(entries[name])
    first = next(iter(config["config"].values()))
    first["use_pickle"] = True
    entries[f"{root}/data/weights/{first['path_name']}"] = saved(Payload(marker))
    entries[name] = json.dumps(config).encode()


def in_opaque_object(entries, root, marker):
    (name,) = (name for name in entries if name.endswith("constants_config.json"))
    config = json.loads(entries[name])
    config["config"]["evil"] = {
        "path_name": "opaque_obj_0",
        "is_param": False,
        "use_pickle": True,
        "tensor_meta": None,
    }
    entries[name] = json.dumps(config).encode()
    entries[f"{root}/data/constants/opaque_obj_0"] = pickle.dumps(Payload(marker))


def in_expression(entries, root, marker):
    (name,) = (name for name in entries if name.endswith("models/model.json"))
    program = json.loads(entries[name])
    code = f"__import__('os').mkdir({str(marker)!r})"
    for value in program["graph_module"]["graph"]["tensor_values"].values():
        value["sizes"] = [{"as_expr": {"expr_str": code, "hint": {"as_int": 1}}}]
    entries[name] = json.dumps(program).encode()


PAYLOADS = (in_sample_inputs, in_weight, in_opaque_object, in_expression)


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    path = tmp_path_factory.mktemp("clean") / "model.pt2"
    exported = torch.export.export(torch.nn.Linear(4, 4), (torch.ones(2, 4),))
    torch.export.save(exported, str(path))
    return path


def poisoned(clean, folder, payload):
    """A copy of a `.pt2` file with a payload in it, and the folder that the payload makes."""
    path, marker = folder / "model.pt2", folder / "it_ran"
    with zipfile.ZipFile(clean) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    payload(entries, next(iter(entries)).partition("/")[0], marker)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path, marker


@pytest.mark.parametrize("payload", PAYLOADS)
def test_a_pt2_file_runs_nothing_without_trust(clean, tmp_path, payload):
    path, marker = poisoned(clean, tmp_path, payload)
    for reader in (read, Torch().read):
        with pytest.raises(InputError, match=r"can run code .* --trust .*trust=True"):
            reader(str(path))
    assert not marker.exists()
    # The payload is a true one: PyTorch runs it.
    with contextlib.suppress(Exception):
        Torch().read(path, trust=True)
    assert marker.exists()


def test_a_refused_pt2_file_is_not_opened(tmp_path):
    """The refusal comes before PyTorch is loaded, and the command exits with 2."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"")
    path.chmod(0)
    code = (
        "import sys; from roost.cli import app\n"
        f"try: app(['capture', {str(path)!r}, '-o', {str(tmp_path / 'graph.json')!r}])\n"
        "finally: print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "can run code" in done.stderr
    assert done.stdout == "False\n"


def test_a_saved_model_needs_trust(tmp_path):
    """TensorFlow would run its initialisers; it need not even be installed to refuse it."""
    (tmp_path / "saved_model.pb").write_bytes(b"")
    for reader in (read, Tensorflow().read, Tensorflow().coverage):
        with pytest.raises(InputError, match="can run code"):
            reader(str(tmp_path))


SMALL = {
    "model_type": "gpt2",
    "n_layer": 1,
    "n_embd": 8,
    "n_head": 2,
    "vocab_size": 20,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attn_implementation": "someone/kernel"}, "someone/kernel' can be code"),
        ({"_attn_implementation": {"": "someone/kernel:f"}}, "can be code from the internet"),
        ({"text_config": {"attn_implementation": "flash_attention_2"}}, "flash_attention_2"),
        ({"experts_implementation": "someone/kernel"}, "known are eager, sdpa"),
        ({"n_layer": 10**40}, "n_layer: is larger than 100000"),
        ({"text_config": {"num_hidden_layers": 10**6}}, "num_hidden_layers: is larger"),
        ({"vocab_size": 10**40}, "vocab_size: is larger than"),
    ],
)
def test_a_config_names_no_code_and_no_endless_model(tmp_path, change, message):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SMALL | change))
    with pytest.raises(InputError, match=message):
        read(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": ' * 5000 + "1" + "}" * 5000, "nested too deep"),
        ('{"a": ' * 100_000, "nested too deep"),
        ('{"model_type": "gpt2", "n_layer": ' + "9" * 5000 + "}", "is not JSON"),
    ],
)
def test_a_config_that_python_cannot_parse(tmp_path, text, message):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read(str(tmp_path))


def test_code_of_a_config_is_left_out_and_nothing_is_downloaded(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    from huggingface_hub import constants

    seen = []
    build = transformers.AutoConfig.for_model

    def recorded(kind, **settings):
        seen.append((settings, constants.HF_HUB_OFFLINE))
        return build(kind, **settings)

    monkeypatch.setattr(transformers.AutoConfig, "for_model", recorded)
    code = {"AutoModelForCausalLM": "evil.Model"}
    inner = {"auto_map": code, "trust_remote_code": True}
    content = SMALL | {"auto_map": code, "inner": inner, "attn_implementation": "eager"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    assert read(str(tmp_path), length=4).num_ops > 5
    ((settings, offline),) = seen
    assert offline
    assert "auto_map" not in settings
    assert settings["inner"] == {}
    assert constants.HF_HUB_OFFLINE is False
