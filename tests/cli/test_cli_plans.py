"""Plans in files on the command line: verified, exported, and told apart from placements."""

import json

import pytest

import roost as package
from roost import zoo

SIZE = {
    "batch": 1,
    "length": 4,
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "kv_heads": 2,
    "intermediate": 32,
    "vocab": 40,
}
SET = [text for key, value in SIZE.items() for text in ("--set", f"{key}={value}")]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """One device, which is on this machine."""
    model, inputs = zoo.model("llama", train=False, **SIZE)
    found = package.place(model, inputs, "cpu", costs="estimated", trials=50, seconds=None)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    found.save(path)
    return path


def test_a_plan_is_verified(roost, plan):
    result = roost("verify", "llama", *SET, "--placement", plan, columns=120)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("the same numbers, to the last bit: 1 step on cpu:0")
    found = json.loads(
        roost("verify", "llama", *SET, "--placement", plan, "--steps", "2", "--json").stdout
    )
    assert (found["same"], found["steps"]) == (True, 2)


def test_other_numbers_exit_with_4(roost, tmp_path, monkeypatch):
    (tmp_path / "mine_planned.py").write_text(
        "import torch\n"
        "class Counts(torch.nn.Linear):\n"
        "    calls = 0\n"
        "    def forward(self, x):\n"
        "        Counts.calls += 1\n"
        "        return super().forward(x) + Counts.calls\n"
        "def net():\n"
        "    return torch.nn.Sequential(torch.nn.Linear(3, 3), Counts(3, 3)), (torch.randn(2, 3),)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import mine_planned

    model, inputs = mine_planned.net()
    package.place(model, inputs, "cpu", costs="estimated", trials=10, seconds=None).save(
        "plan.json"
    )
    result = roost("verify", "mine_planned:net", "--placement", "plan.json", "--json")
    assert result.exit_code == 4
    assert not json.loads(result.stdout)["same"]
    assert "error: not the same numbers" in result.stderr


def test_a_plan_is_exported(roost, plan, tmp_path):
    result = roost("export", "llama", *SET, "--placement", plan, "--format", "device_map")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"": "cpu"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("verify", "llama", *SET, "--train"), "a plan is for inference; leave out --train"),
        (
            ("verify", "llama", *SET, "--on", "h200"),
            "is a plan, with a cluster and costs of its own; leave out --on",
        ),
        (("verify", "llama", *SET, "--set", "hidden=32"), "the plan is for model "),
        (
            ("export", "llama", *SET, "--set", "hidden=32", "--format", "device_map"),
            "the plan is for model ",
        ),
        (("export", "graph.json", "--format", "device_map"), "name the model that the plan is for"),
        (
            ("run", "llama", *SET),
            "is a plan; in Python plan.apply(model) runs the model with it",
        ),
    ],
)
def test_what_is_refused(refused, plan, call, message):
    assert message in refused(*call, "--placement", plan)
