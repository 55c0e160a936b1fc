"""From a model to a plan to the placed model."""

import copy
import json
import subprocess
import sys
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import roost
from roost.core.units import parse_bytes
from roost.errors import Infeasible, InputError, UnknownName, VerificationFailed
from roost.frontends.torch import step_of
from roost.plan import kv_bytes
from roost.plan.clusters import STORE, cluster_of, hop_of
from roost.plan.in_call_copies import copied_in_calls, loads_of
from roost.plan.module_search import Correction, Relief
from roost.plan.placing import _tried
from roost.plan.plan import simulated
from roost.plan.trial_runs import corrected, fastest_of_runs
from roost.runtime.whole.apply import apply, remove
from roost.runtime.whole.module_placement import ModulePlacement, named_tensors, signature
from roost.runtime.whole.rounding import by_modules
from roost.runtime.whole.trial_run import TrialRun
from roost.runtime.whole.verify import verify_modules
from roost.testing.schemas import published


class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(size),
            nn.Linear(size, 4 * size),
            nn.Linear(4 * size, size),
        )

    def forward(self, x):
        return x + self.down(functional.gelu(self.up(self.norm(x))))


class Tower(nn.Module):
    """An embedding tied to a head, attention, and blocks: 25 MiB of weights."""

    def __init__(self, size=256, vocabulary=2000, count=10):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, size)
        self.attention = nn.MultiheadAttention(size, 4, batch_first=True)
        self.blocks = nn.ModuleList(Block(size) for _ in range(count))
        self.head = nn.Linear(size, vocabulary, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for block in self.blocks:
            x = block(x)
        return self.head(x)


IDS = torch.arange(6).reshape(2, 3)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Tower().eval()


def planned(model, cap="112MiB", inputs=IDS, **more):
    """For a GPU that has room for little more than half of the weights, beside what libraries
    take."""
    more = {
        "memory": {"cuda:0": cap},
        "costs": "estimated",
        "trials": 3000,
        "seconds": None,
        **more,
    }
    return roost.place(model, inputs, "h200", **more)


@pytest.fixture(scope="module")
def plan(model):
    return planned(model)


def on_threads(plan):
    """The same on devices that are here: threads in place of a GPU."""
    names = {"cuda:0": "cpu:0", "cpu:0": "cpu:1"}
    where = plan.modules
    return replace(
        where,
        main=names[where.main],
        home={name: names[device] for name, device in where.home.items()},
        runs_on={name: names[device] for name, device in where.runs_on.items()},
    )


def test_a_plan_fits_and_says_what_it_does(model, plan):
    weights = sum(p.numel() * 4 for p in model.parameters())
    capped = plan.problem.cluster.devices[1]
    # Libraries, and what PyTorch holds longer.
    assert capped.memory < 112 * 2**20 - 96 * 2**20 < weights
    assert plan.timeline.feasible
    assert sum(plan._weights().values()) == weights
    assert set(plan.modules.home.values()) == {"cuda:0", "cpu:0"}
    assert plan.modules.main == "cuda:0"
    assert plan.step_time >= plan.result.bound.step_time
    said = str(plan)
    assert "kept on cuda:0" in said
    assert "step: " in said
    assert "memory: " in said


def test_what_takes_long_is_logged(model, caplog):
    caplog.set_level("INFO")
    planned(model)
    assert caplog.messages[0] == "capturing the model"
    assert (
        f"searching for a placement of {roost.capture(model, IDS).num_ops} ops" in caplog.messages
    )


def test_streamed_weights_queue_for_one_link(model, plan):
    """Weights that a GPU reads and that live with the CPU come from one device, whatever the search
    thought."""
    graph, names = plan.problem.graph, plan.problem.cluster.device_names
    consumers, device = graph.consumer_lists(), plan.placement.device
    for weight in np.flatnonzero(graph.is_parameter).tolist():
        if any(device[reader] == 1 for reader in consumers[weight]) and not any(
            device[reader] == 0 for reader in consumers[weight]
        ):
            assert names[device[weight]] in ("cuda:0", STORE)


def test_the_placed_model_gives_the_same(model, plan):
    with torch.no_grad():  # attention has a way of its own then
        expected = model(IDS)
    apply(model, on_threads(plan))
    assert torch.equal(model(IDS), expected)
    assert torch.equal(model(IDS), expected)
    remove(model)


def test_weights_read_from_outside_their_module_stay(model, plan):
    """`out_proj` of an attention is read by the module around it: that is what it can be brought
    for."""
    assert "attention.out_proj" not in plan.modules.streamed
    assert "attention.out_proj" not in plan.modules.runs_on


def test_verify_tells_what_differs(model, plan):
    here = replace(plan, modules=on_threads(plan))
    found = here.verify(model)
    assert found.same
    assert found.bitwise
    assert "the same numbers, to the last bit" in str(found)
    odd = next(iter(here.modules.streamed))
    name = here.modules.streamed[odd][0]

    def wrong(self, placement=None, settle=roost.runtime.whole.apply.PlacedModel._stream):
        settle(self)
        for weights in self.window._order:
            if weights.name == odd:
                weights.tensors[0] = weights.tensors[0] * 3.0  # not what the module has

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(roost.runtime.whole.apply.PlacedModel, "_stream", wrong)
        found = here.verify(model)
    assert not found.same
    assert found.first_op == odd
    assert name.startswith(odd)
    with pytest.raises(VerificationFailed):
        found.check()
    assert not hasattr(model, "_roost_placed")


@pytest.fixture
def saved(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    return tmp_path / "plan.json"


def test_a_plan_comes_back_the_same(model, plan, saved, tmp_path):
    loaded = roost.load(saved)
    assert isinstance(loaded, roost.Plan)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == saved.read_bytes()
    assert str(loaded) == str(plan)
    assert (loaded.modules, loaded.placement) == (plan.modules, plan.placement)
    assert (loaded.problem.digest, loaded.step_time) == (plan.problem.digest, plan.step_time)
    assert loaded.device_map().entries == plan.device_map().entries
    jsonschema.validate(json.loads(saved.read_bytes()), json.loads(published()["plan.schema.json"]))
    plan.save(tmp_path / "plan.json.gz")
    assert repr(roost.load(tmp_path / "plan.json.gz")) == repr(plan)


def test_a_loaded_plan_is_for_its_model_alone(model, saved):
    loaded = roost.load(saved)
    here = replace(loaded, modules=on_threads(loaded))
    with torch.no_grad():
        expected = model(IDS)
    here.apply(model)
    assert torch.equal(model(IDS), expected)
    here.remove(model)
    assert here.verify(model, IDS).same
    with pytest.raises(
        InputError, match=r"no inputs to call the model with; give some: verify\(model, inputs\)"
    ):
        here.verify(model)
    others = (Tower(count=2), Tower(size=128))  # the second has the same names
    for other in others:
        said = f"the plan is for model {signature(model)}, this model is {signature(other)}"
        for call in (loaded.apply, lambda other: here.verify(other, IDS), loaded.device_map):
            with pytest.raises(InputError, match=said):
                call(other)


def test_a_bad_plan_file_is_told_by_field(saved, tmp_path):
    content = json.loads(saved.read_bytes())
    weight = next(iter(content["modules"]["home"]))
    for path, value, said in (
        (
            ("modules", "main"),
            "cuda:9",
            "modules.main: 'cuda:9' is no device of the problem; it has cpu:0, cuda:0",
        ),
        (("modules", "home", weight), "tpu", f"modules.home['{weight}']: 'tpu' is no device"),
        (("modules", "model"), "", "modules.model: is empty"),
        (("modules", "window"), -1, "modules.window: Expected int >= 0"),
        (
            ("modules", "window"),
            2**50,
            "modules.window: is 1125899906842624 bytes; 'cuda:0' of the problem has ",
        ),
        (("modules", "home", weight), STORE, f"modules.home['{weight}']: '{STORE}' is no device"),
        (
            ("problem", "cluster", "devices", 0, "kind"),
            "odd",
            f"problem: cluster.devices: '{STORE}' must be the last",
        ),
        (
            ("modules", "streamed"),
            {"blocks.0": ["nothing"]},
            "modules: 'nothing' is streamed to 'blocks.0', but",
        ),
        (("placement", "device"), [0], "placement: the placement has 1 entries"),
        (("problem", "op_time"), [], "problem: op_time: is empty"),
        (("result", "best", "digest"), "0", "result: digest: '0' is not that of the placement"),
        (("version",), 2, "version: roost.plan 2 is not known; this Roost reads version 1"),
        (("more",), 2, "Object contains unknown field more"),
    ):
        changed = copy.deepcopy(content)
        at = changed
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
        (tmp_path / "bad.json").write_text(json.dumps(changed))
        with pytest.raises(InputError) as raised:
            roost.load(tmp_path / "bad.json")
        assert str(raised.value).startswith(f"{tmp_path / 'bad.json'}: {said}")
    (tmp_path / "bad.json").write_bytes(saved.read_bytes()[:-50])
    with pytest.raises(InputError, match=r"bad\.json: is not whole JSON"):
        roost.load(tmp_path / "bad.json")


class Changing(nn.Module):
    """BatchNorm that learns its statistics, dropout, and a result that is a dataclass of its
    own."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return functional.dropout(self.norm(self.fc(x)), 0.5, self.training)


def test_verify_leaves_a_model_as_it_was(plan):
    model, given = Changing().train(), torch.randn(4, 8)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    where = ModulePlacement("cpu:0", {"fc.weight": "cpu:1"}, {}, {"fc": ("fc.weight",)})
    found = replace(plan, modules=where).verify(model, given)
    assert found.same
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_memory_of_the_host_counts_once(model):
    """Weights that are streamed and weights that are used in place lie in one memory."""
    caps = {"cuda:0": "112MiB", "cpu:0": "14MiB"}
    plan = roost.place(
        model, IDS, "h200", memory=caps, costs="estimated", trials=3000, seconds=None
    )
    problem, placement = plan.on_real_devices()
    assert roost.simulate(problem, placement).peak_memory[0] <= 14 * 2**20
    caps = {"cuda:0": "106MiB", "cpu:0": "9MiB"}
    with pytest.raises(Infeasible):
        roost.place(model, IDS, "h200", memory=caps, costs="estimated", trials=500, seconds=None)


def test_a_model_that_fits_stays_whole(model):
    plan = planned(model, "1GiB")
    assert set(plan.modules.home.values()) == {"cuda:0"}
    assert not plan.modules.streamed
    assert not plan.modules.runs_on
    assert "one device is best: everything runs on cuda:0" in str(plan)


def test_what_must_be_exact_is_not_computed_on_the_cpu(model):
    machine = roost.cluster("h200")
    slow = replace(
        machine,
        links=tuple(replace(link, bandwidth=link.bandwidth / 100) for link in machine.links),
    )
    for exact in (False, True):
        found = roost.place(
            model,
            IDS,
            slow,
            memory={"cuda:0": "112MiB"},
            costs="estimated",
            exact=exact,
            trials=3000,
            seconds=None,
        )
        assert bool(found.modules.runs_on) != exact
        assert found.modules.streamed or not exact
        assert found.step_time < 1


def test_what_cannot_be_exact_is_told(model):
    """Where too little memory is left, the CPU would compute, if only very slowly; not where
    nothing but it may."""
    with pytest.raises(
        Infeasible,
        match=r"computes on 'cuda:0' alone, as exact asks: .* would run on 'cpu:0'; give",
    ):
        planned(model, cap="98MiB", exact=True)
    assert planned(model, cap="98MiB").modules.runs_on
    for shape in ((1, 2), (3, 2)):
        with pytest.raises(InputError, match="op_time is "):
            roost.place(
                model,
                IDS,
                "h200",
                costs=roost.Costs(np.zeros(shape)),
                exact=True,
                trials=10,
                seconds=None,
            )


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(
    ("caps", "reserve"),
    [
        ({"cuda:0": 3686}, {}),
        ({"cuda:0": "90MiB"}, {"cuda:0": "50MiB"}),
        ({"cuda:0": "106MiB", "cpu:0": "9MiB"}, {}),
        ({"cuda:0": "20MiB", "cpu:0": "20MiB"}, {"cuda:0": "1MiB"}),
    ],
)
def test_what_is_missing_is_enough(model, caps, reserve, exact):
    given = {
        "reserve": reserve,
        "costs": "estimated",
        "exact": exact,
        "trials": 1000,
        "seconds": None,
    }
    with pytest.raises(Infeasible, match=r"; \d+ MiB of 'cuda:0' are enough") as told:
        roost.place(model, IDS, "h200", memory=caps, **given)
    assert told.value.device == "cuda:0"
    more = parse_bytes(caps["cuda:0"]) + told.value.missing_bytes
    assert roost.place(
        model, IDS, "h200", memory=caps | {"cuda:0": more}, **given
    ).timeline.feasible


def test_on_a_cpu_alone_what_is_missing_is_told_too(model):
    given = {"costs": "estimated", "trials": 50, "seconds": None}
    for caps, reserve in (({"cpu:0": "1GiB"}, {"cpu:0": "1000GiB"}), ({"cpu:0": "4MiB"}, {})):
        with pytest.raises(Infeasible, match=r"; [\d,]+ MiB of 'cpu:0' are enough") as told:
            roost.place(model, IDS, "cpu", memory=caps, reserve=reserve, **given)
        assert told.value.missing_bytes > 0


def test_what_goes_to_files_and_exports_has_no_device_that_is_memory(plan):
    problem, placement = plan.on_real_devices()
    assert problem.cluster.device_names == ("cpu:0", "cuda:0")
    # The link as it is.
    assert problem.cluster.seconds_per_byte[0, 1] == plan.problem.cluster.seconds_per_byte[2, 1]
    assert roost.simulate(problem, placement).feasible
    assert any(name.startswith("blocks") for name in plan.device_map().entries)


def test_what_is_refused(model, plan):
    with pytest.raises(Infeasible):
        roost.place(
            model,
            IDS,
            "h200",
            memory={"cuda:0": "1MiB", "cpu:0": "1MiB"},
            costs="estimated",
            seconds=1,
        )
    with pytest.raises(UnknownName, match="'cuda:7'"):
        roost.place(model, IDS, "h200", memory={"cuda:7": "1MiB"}, costs="estimated")
    with pytest.raises(UnknownName, match="no kind of costs called 'guessed'"):
        roost.place(model, IDS, "h200", costs="guessed")
    with pytest.raises(InputError, match="no configuration"):
        kv_bytes(model, 100)
    for wrong in (-1, 1.5, "5", None):
        with pytest.raises(InputError, match="kv_tokens is"):
            roost.place(model, IDS, "h200", costs="estimated", kv_tokens=wrong)
    for wrong in (
        {"cuda:0": None},
        {"cuda:0": "lots"},
        ["cuda:0"],
        "6GiB",
        {0: 5},
        {"cuda:0": True},
    ):
        with pytest.raises(InputError, match=r"size"):
            roost.place(model, IDS, "h200", costs="estimated", memory=wrong)
    with pytest.raises(InputError, match="cluster is 5"):
        roost.place(model, IDS, 5)
    with pytest.raises(InputError, match="several CPUs"):
        roost.place(model, IDS, roost.cluster("two_hosts_a100x4"), costs="estimated")
    with pytest.raises(Infeasible, match="must stay free"):
        roost.place(model, IDS, "h200", costs="estimated", reserve={"cuda:0": "1000GiB"})
    other = Tower(count=2)
    with pytest.raises(InputError, match="the plan is for model"):
        plan.apply(other)
    with pytest.raises(InputError, match="meta device"):
        plan.verify(model, IDS.to("meta"))


def test_keys_and_values_take_room():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=97,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    assert kv_bytes(model, 10) == 2 * 3 * 2 * 16 * 4 * 10
    settings = {"costs": "estimated", "trials": 200, "seconds": None, "memory": {"cuda:0": "1GiB"}}
    rooms = [
        roost.place(model, {"input_ids": IDS}, "h200", kv_tokens=tokens, **settings)
        .problem.cluster.devices[1]
        .memory
        for tokens in (0, 1000)
    ]
    prompt = 128 * 64 * 4  # the largest weight, which a prompt may bring
    assert rooms[0] - rooms[1] == kv_bytes(model, 1000) + prompt
    assert model.config.use_cache  # as it was


def test_on_this_machine_one_device_is_used_whole():
    code = """
import torch, roost
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8)).eval()
given = torch.randn(4, 64)
expected = model(given)
plan = roost.place(model, given, trials=50, seconds=None)
plan.apply(model)
assert torch.equal(model(given), expected)
print(plan)
"""
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
    assert "kept on" in said


class Recurrent(nn.Module):
    """One module with several large weights."""

    def __init__(self, size=512):
        super().__init__()
        self.layers, self.out = (
            nn.LSTM(size, size, num_layers=4, batch_first=True),
            nn.Linear(size, size),
        )

    def forward(self, x):
        return self.out(self.layers(x)[0])


def test_the_window_holds_all_that_a_module_needs_at_once():
    model = Recurrent().eval()
    for cap in (114, 120):
        plan = roost.place(
            model,
            torch.randn(2, 4, 512),
            "h200",
            memory={"cuda:0": cap * 2**20},
            costs="estimated",
            trials=200,
        )
        tensors = named_tensors(model)
        loads = [
            sum(tensors[name].nbytes for name in names) for names in plan.modules.streamed.values()
        ]
        assert plan.modules.window >= max(loads, default=0)
        assert plan.timeline.feasible
        kept = sum(
            tensors[name].nbytes for name, home in plan.modules.home.items() if home == "cuda:0"
        )
        assert kept + plan.modules.window <= (cap - 96) * 2**20


def test_what_is_no_model_is_told():
    with pytest.raises(InputError, match=r"torch\.nn\.Module is needed, not function"):
        roost.place(lambda x: x, torch.ones(1))


# ---------------------------------------------------------------------- plans that were run


def search_of(model, cap="112MiB", inputs=IDS, **more):
    """What `place` makes of its arguments, before it searches."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            roost.plan.module_search.PlanSearch,
            "first_plan",
            lambda self, may_run: found.append(self) or 1 / 0,
        )
        with pytest.raises(ZeroDivisionError):
            planned(model, cap, inputs, **more)
    return found[0]


def computed_on_cpu(plan):
    return float(plan.problem.op_time[plan.placement.device == 0, 0].sum())


def test_a_cpu_that_is_slower_than_thought_gets_less_to_do(model):
    search = search_of(model)
    # So that it pays to compute on the CPU: a slow link.
    slow = tuple(replace(link, bandwidth=2e8) for link in search.cluster.links)
    search = replace(search, cluster=replace(search.cluster, links=slow))
    first, known = search.first_plan(may_run=False)
    assert first.modules.runs_on
    runs = []

    def tries(plan):
        """A machine on which the CPU takes eight times as long, and everything else what was
        thought."""
        runs.append(plan)
        cpu = computed_on_cpu(first if plan is first else plan)
        thought = cpu if plan is first else cpu / 8.0
        return TrialRun(
            plan.step_time + 7.0 * thought * (plan is first),
            2**20,
            2**20,
            8.0 * thought,
            len(plan.modules.runs_on),
        )

    best = fastest_of_runs(search, first, known, tries)
    assert len(runs) >= 2
    assert computed_on_cpu(runs[1]) / 8.0 < computed_on_cpu(first)
    assert best.measured == min(tries(plan).seconds for plan in runs[:])
    assert best.measured < tries(first).seconds
    assert "measured, " in str(best)


def test_a_plan_that_holds_too_much_when_run_is_not_taken(model, monkeypatch):
    search = search_of(model)
    first, known = search.first_plan(may_run=False)
    room = 112 * 2**20
    peaks = []

    def tries(plan):
        beyond = 100 * 2**20  # more than the rules leave free
        peaks.append(int(plan.timeline.peak_memory[1]) + beyond)
        return TrialRun(plan.step_time, peaks[-1], peaks[-1], 0.0, 0)

    best = fastest_of_runs(search, first, known, tries)
    assert peaks[0] > room
    assert int(best.timeline.peak_memory[1]) + 100 * 2**20 <= room
    assert best.measured == best.step_time
    assert len(peaks) >= 2
    hopeless = lambda plan: TrialRun(1.0, room + 2**30, 0, 0.0, 0)  # noqa: E731
    with pytest.raises(
        Infeasible, match=r"run used 1.1 GiB on 'cuda:0', which has 112.0 MiB; give it more"
    ):
        fastest_of_runs(search, first, known, hopeless)
    monkeypatch.setattr("roost.plan.placing.trial_run", raises_out_of_memory)
    with pytest.raises(
        Infeasible, match=r"every trial run ran out of the 112.0 MiB of 'cuda:0'; give it more"
    ):
        fastest_of_runs(search, first, known, lambda plan: _tried(model, plan))


def raises_out_of_memory(*_):
    raise torch.OutOfMemoryError


def test_what_a_run_leaves_free_is_used(model):
    """The rules leave 96 MiB for libraries; where a run needs none of it, more weights stay on the
    device."""
    search = search_of(model)
    first, known = search.first_plan(may_run=False)
    best = fastest_of_runs(
        search,
        first,
        known,
        lambda plan: TrialRun(plan.step_time, int(plan.timeline.peak_memory[1]), 0, 0.0, 0),
    )
    assert best.step_time < first.step_time
    assert int(best.timeline.peak_memory[1]) <= 112 * 2**20
    growing = replace(search, reserved={"cuda:0": 2**20})  # more is to come than the run has shown
    assert corrected(growing, first, known, TrialRun(1.0, 0, 0, 0.0, 0)).spare == growing.spare(
        known
    )


def test_a_plan_that_cannot_be_run_is_as_it_was(model, caplog):
    search = search_of(model)
    first, known = search.first_plan(may_run=False)
    assert fastest_of_runs(search, first, known, lambda plan: None) is first

    class Fails(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(2, 2)

        def forward(self, x):
            if not torch.compiler.is_exporting():
                raise ValueError("not today")
            return self.inside(x)

    plan = roost.place(
        Fails().eval(), torch.ones(1, 2), costs="estimated", trials=50, seconds=None, measure=True
    )
    assert plan.measured is None
    assert "the plan could not be run: ValueError: not today" in caplog.text


def test_a_plan_is_run_on_the_model_and_leaves_it_as_it_was(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.inside = nn.Linear(64, 64)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls += 1
            return self.inside(x)

    model, given = Counts().eval(), torch.ones(3, 64)
    plan = roost.place(model, given, costs="estimated", trials=50, seconds=None, measure=True)
    assert plan.measured > 0
    assert float(model.calls) == 0
    assert not hasattr(model, "_roost_placed")
    plan.save(tmp_path / "plan.json")
    assert roost.load(tmp_path / "plan.json").measured == plan.measured
    assert roost.place(model, given, costs="estimated", trials=50, seconds=None).measured is None
    with pytest.raises(InputError, match="measure is 'no'; it must be True, False or None"):
        roost.place(model, given, measure="no")


def test_less_is_left_free_than_by_rule_only_where_a_run_shows_that_it_is_enough(
    model, monkeypatch
):
    little = {"cuda:0": "110MiB", "cpu:0": "1KiB"}  # 23 MiB of weights, and 96 MiB by rule
    more = {"memory": little, "costs": "estimated", "trials": 200, "seconds": None}
    with pytest.raises(Infeasible):
        roost.place(model, IDS, "h200", measure=True, **more)  # it cannot be run here
    runs = []
    cluster = roost.presets.cluster("h200")
    monkeypatch.setattr(
        "roost.plan.placing.cluster_of", lambda name, memory: cluster_of(cluster, memory)
    )
    monkeypatch.setattr(
        "roost.plan.placing._costs", lambda step, where, *_: roost.estimate(step.graph, where).costs
    )
    monkeypatch.setattr(
        "roost.plan.placing._tried",
        lambda _, plan: runs.append(plan) or TrialRun(1.0, 2**20, 0, 0.0, 0),
    )
    plan = roost.place(model, IDS, memory=little, trials=200, seconds=None)
    assert len(runs) == 1
    assert not plan.modules.streamed
    assert plan.measured == 1.0


def test_what_only_holds_modules_and_is_never_called_runs_nowhere():
    class Listed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(512, 512) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    model = Listed().eval()
    step = step_of(model, torch.ones(1, 512))
    problem = roost.estimate(step.graph, roost.presets.cluster("h200"))
    # On the CPU, beside a GPU with nothing to do.
    everywhere = problem.placement(np.zeros(step.graph.num_ops, int))
    modules, _ = by_modules(problem, everywhere, model)
    assert modules.main == "cuda:0"
    assert dict(modules.runs_on) == {f"layers.{number}": "cpu:0" for number in range(3)}


class Writes(nn.Module):
    """Writes into its input, puts another tensor in place of a buffer, and has one that it did not
    have."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if not torch.compiler.is_exporting():
            assert float(x[0, 0]) == 1.0  # each call is given what was to be given
            x += 1
            self.register_buffer("last", x)
        self.calls = self.calls + 1
        return self.inside(x)


def test_a_try_leaves_inputs_and_buffers_that_a_model_writes_into():
    model, given = Writes().eval(), torch.ones(3, 64)
    calls = model.calls
    plan = roost.place(model, given, costs="estimated", trials=50, seconds=None, measure=True)
    assert plan.measured > 0
    assert bool((given == 1).all())
    assert model.calls is calls  # on the device where it was
    assert float(calls) == 0
    assert list(model.state_dict()) == ["calls", "inside.weight", "inside.bias"]


def test_verifying_leaves_the_buffers_that_were_there():
    class Replaces(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x):
            self.calls = self.calls + 1
            return x * self.calls

    model = Replaces()
    calls = model.calls
    assert verify_modules(model, ModulePlacement("cpu", {}), torch.ones(2)).same
    assert model.calls is calls
    assert float(calls) == 0


class Images(nn.Sequential):
    """Few weights and large activations at the start."""

    def __init__(self):
        large = [nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(8)]
        super().__init__(*large, nn.Flatten(), nn.Linear(4096, 512), nn.ReLU(), nn.Linear(512, 10))


def test_modules_without_weights_leave_where_activations_do_not_fit():
    torch.manual_seed(0)
    model, images = Images().eval(), torch.randn(8, 3, 128, 128)
    cap = (96 + 21) * 2**20  # 8 MiB each in and out of the first ReLU, 8 MiB of weights
    plan = roost.place(
        model, images, "h200", memory={"cuda:0": cap}, costs="estimated", trials=2000, seconds=None
    )
    where = plan.modules
    assert {"1", "2"} <= set(where.runs_on)
    assert "1" in where.stays
    assert where.runs_on.keys() - set(where.stays)  # the last of them gives its output back
    assert where.few_rows == 0
    with torch.no_grad():
        expected = model(images)
    apply(model, on_threads(plan))
    assert torch.equal(model(images), expected)
    remove(model)
    with pytest.raises(
        InputError, match="the outputs of module '1' are to stay elsewhere, but it runs on cuda:0"
    ):
        replace(where, runs_on={})


def test_where_activations_need_room_light_modules_leave_or_weights_come_in_their_calls():
    """With 21 MiB the ReLU's 16 fit, but not beside a window of 8 for the weights: what is fastest
    is taken."""
    torch.manual_seed(0)
    search = search_of(Images().eval(), (96 + 21) * 2**20, torch.randn(8, 3, 128, 128))
    bare, roomy = Correction(spare=96 * 2**20), Correction(spare=80 * 2**20)
    assert search._in_calls(roomy) == ()
    assert search._in_calls(bare) == ("4",)
    assert (
        search._in_calls(Correction(spare=102 * 2**20)) is None
    )  # 15 MiB are less than a ReLU needs
    plans = [
        search.plan(bare, each) for each in (Relief(), Relief(light=True), Relief(in_calls=("4",)))
    ]
    brought = plans[2]
    assert brought.modules.on_the_spot == ("4",)
    assert brought.modules.runs_on == {}
    assert brought.modules.window < 2**20
    assert "copied from host memory in each call    8.0 MiB of weights" in str(brought)
    alike = search._problem(bare, light=True)
    fastest = min(plans, key=lambda each: simulated(alike, each.placement, each.modules).step_time)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(search), "spare", lambda self, known: 96 * 2**20)
        found, _ = search.first_plan(may_run=False)
    assert found.modules == fastest.modules
    assert found.step_time == fastest.step_time


def test_weights_that_come_in_their_calls(tmp_path):
    torch.manual_seed(0)
    model, images = Images().eval(), torch.randn(8, 3, 128, 128)
    search = search_of(model, (96 + 21) * 2**20, images)
    plan = search.plan(Correction(spare=96 * 2**20), Relief(in_calls=("4",)))
    assert int(plan.timeline.peak_memory[1]) <= 21 * 2**20
    assert plan.timeline.feasible
    plan.save(tmp_path / "plan.json")
    again = roost.load(tmp_path / "plan.json")
    assert again.modules == plan.modules
    assert again.step_time == plan.step_time
    assert str(again) == str(plan)
    with torch.no_grad():
        expected = model(images)
    weight = model[4].weight
    apply(model, on_threads(plan))
    for _ in range(2):
        assert torch.equal(model(images), expected)
        assert model[4].weight is weight
    with torch.no_grad():
        weight.mul_(2)  # of the next call it is part
    assert not torch.equal(model(images), expected)
    with torch.no_grad():
        weight.mul_(0.5)
    model[4].weight = nn.Parameter(weight.detach().clone())
    with pytest.raises(
        InputError, match="a weight of module '4' is another tensor than when the plan was applied"
    ):
        model(images)
    model[4].weight = weight
    remove(model)
    assert torch.equal(model(images), expected)
    with pytest.raises(
        InputError,
        match="weights of module '1' are to be copied in its call, but it has no streamed",
    ):
        replace(plan.modules, on_the_spot=("1",))


def test_what_ops_hold_for_themselves_counts_where_it_is_known():
    torch.manual_seed(0)
    search = search_of(Images().eval(), (96 + 40) * 2**20, torch.randn(8, 3, 128, 128))
    graph = search.step.graph
    space = np.where(np.array(graph.kinds) == "convolution", 36 * 2**20, 0)
    known = replace(search, workspace=space)
    assert known.spare(Correction()) == search.spare(Correction()) - 56 * 2**20
    first, there = (
        search.plan(Correction(spare=96 * 2**20)),
        known.plan(Correction(spare=96 * 2**20), Relief(light=True)),
    )
    assert "0" not in first.modules.runs_on
    assert "0" in there.modules.runs_on  # 8 MiB come of it, and it would need 36 more


def test_a_call_that_its_weights_come_in_takes_longer_and_holds_them():
    """A module that is called twice gets its weights twice; no window is needed for them."""
    builder = roost.GraphBuilder("calls")
    big, small = builder.parameter("big.weight", 2**21), builder.parameter("small.weight", 2**20)
    x = builder.add("x", "input", phase="input", output_bytes=100)
    for call in range(2):
        x = builder.add(
            f"big{call}", "mm", [x, big], module=f"big@{call}", output_bytes=100, workspace_bytes=7
        )
        x = builder.add(f"act{call}", "relu", [x], module=f"big@{call}", output_bytes=100)
    builder.add("small", "mm", [x, small], module="small", output_bytes=100)
    devices = (roost.Device("cpu", "cpu", 2**30), roost.Device("cuda:0", "cuda", 2**30))
    cluster = roost.Cluster("two", devices, (roost.Link("*", "*", 1e9, 1e-5),))
    graph = builder.freeze()
    problem = roost.Problem(
        graph, cluster, np.where(graph.is_parameter[:, None], 0.0, 1e-3).repeat(2, axis=1)
    )
    assert {name: len(own) for name, own in loads_of(graph).items()} == {"big": 1, "small": 1}
    brought = copied_in_calls(problem, "cuda:0", ("big",))
    where = {name: op for op, name in enumerate(graph.op_names)}
    for call in range(2):
        op = where[f"big{call}"]
        assert brought.graph.workspace_bytes[op] == 2**21 + 7
        assert brought.op_time[op].tolist() == pytest.approx([1e-3, 1e-3 + 1e-5 + 2**21 / 1e9])
        assert where["big.weight"] not in brought.graph.inputs_of(op)
    assert brought.op_time[where["act0"], 1] == 1e-3
    assert where["small.weight"] in brought.graph.inputs_of(where["small"])
    away = np.where(graph.is_parameter, 0, 1)
    held = [
        roost.simulate(each, each.placement(away)).peak_memory.tolist()
        for each in (problem, brought)
    ]
    assert held[0] == [2**21 + 2**20, 2**21 + 200 + 7]
    # A window for the small one alone, and the call's own.
    assert held[1] == [2**21 + 2**20, 2**20 + 2**21 + 200 + 7]
    assert copied_in_calls(problem, "cuda:0", ()) is problem


def test_a_cap_below_what_is_left_free_by_rule_is_tried_with_less():
    search = search_of(Images().eval(), 80 * 2**20, torch.randn(8, 3, 128, 128))
    assert search.spare(Correction()) > 80 * 2**20
    with pytest.raises(Infeasible, match="nothing fits: 'cuda:0' has 80"):
        search.first_plan(may_run=False)
    plan, known = search.first_plan(may_run=True)
    assert plan.timeline.feasible
    assert known.spare == search.margin


def test_weights_that_come_in_a_call_are_there_until_it_is_over():
    """With all that is computed in it, by the module and by those inside."""
    builder = roost.GraphBuilder("calls")
    weight = builder.parameter("big.weight", 2**21)
    x = builder.add("x", "input", phase="input", output_bytes=100)
    before = builder.add("before", "relu", [x], module="big.inside", output_bytes=100)
    x = builder.add("mm", "mm", [before, weight], module="big", output_bytes=100)
    x = builder.add("wide", "repeat", [x], module="big.inside@1", output_bytes=2**22)
    x = builder.add("sum", "sum", [x], module="big", output_bytes=100)
    builder.add("after", "relu", [x], module="bigger", output_bytes=100)
    devices = (roost.Device("cpu", "cpu", 2**30), roost.Device("cuda:0", "cuda", 2**30))
    cluster = roost.Cluster("two", devices, (roost.Link("*", "*", 1e9, 1e-5),))
    graph = builder.freeze()
    problem = roost.Problem(
        graph, cluster, np.where(graph.is_parameter[:, None], 0.0, 1e-3).repeat(2, axis=1)
    )
    brought = copied_in_calls(problem, "cuda:0", ("big",))
    assert brought.graph.workspace_bytes.tolist() == [0, 0, 2**21, 2**21, 2**21, 2**21, 0]
    assert brought.op_time[:, 1].argmax() == graph.op_names.index("mm")
    timeline = roost.simulate(brought, brought.placement(np.where(graph.is_parameter, 0, 1)))
    assert timeline.peak_memory[1] == 2**21 + 2**22 + 100


class Borrowing(nn.Module):
    """Reads a weight of its own, and one of a module beside it that is never called."""

    def __init__(self, other):
        super().__init__()
        self.weight, self.beside = nn.Parameter(torch.randn(512, 512)), [other]

    def forward(self, x):
        return (x @ self.weight) @ self.beside[0].weight


class Borrower(nn.Module):
    def __init__(self):
        super().__init__()
        self.other = nn.Linear(512, 512, bias=False)
        self.reads = Borrowing(self.other)

    def forward(self, x):
        return self.reads(x)


def test_a_weight_that_its_reader_does_not_hold_does_not_come_in_calls():
    torch.manual_seed(0)
    model, x = Borrower().eval(), torch.randn(4, 512)
    search = search_of(model, "112MiB", x)
    graph = search.step.graph
    assert {
        module: [graph.op_names[op] for op in own] for module, own in loads_of(graph).items()
    } == {"reads": ["reads.weight"]}
    plan = search.plan(relief=Relief(in_calls=("reads",)))
    assert plan.modules.streamed == {"reads": ("reads.weight",)}
    assert plan.modules.home["other.weight"] == "cuda:0"


def test_a_host_that_not_all_weights_fit_in_says_nothing_of_activations(model):
    search = search_of(model, memory={"cuda:0": "112MiB", "cpu:0": "20MiB"})
    assert search._in_calls(Correction()) == ()
    plan, _ = search.first_plan(may_run=False)
    assert plan.timeline.feasible


def test_a_file_with_weights_that_cannot_come_on_the_spot_is_refused(tmp_path):
    search = search_of(Images().eval(), (96 + 21) * 2**20, torch.randn(8, 3, 128, 128))
    plan = search.plan(Correction(spare=96 * 2**20), Relief(in_calls=("4",)))
    with pytest.raises(InputError, match="on_the_spot names a module twice"):
        replace(plan.modules, on_the_spot=("4", "4"))
    device = np.array(plan.placement.device)
    device[plan.problem.graph.op_names.index("4.weight")] = 1
    replace(plan, placement=replace(plan.placement, device=device)).save(tmp_path / "plan.json")
    with pytest.raises(
        InputError, match=r"modules.on_the_spot: op '4.weight' may only run on memory"
    ):
        roost.load(tmp_path / "plan.json")
    devices = (roost.Device("cuda:0", "cuda", 2**30), roost.Device("cuda:1", "cuda", 2**30))
    cluster = roost.Cluster("two", devices, (roost.Link("*", "*", 1e9, 1e-5),))
    graph = plan.problem.graph
    with pytest.raises(InputError, match="no device is a CPU to copy from"):
        copied_in_calls(
            roost.Problem(graph, cluster, np.zeros((graph.num_ops, 2))), "cuda:0", ("4",)
        )


class Turned(nn.Module):
    """A weight, and a large buffer."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.register_buffer("turn", torch.randn(size, size) / size**0.5)

    def forward(self, x):
        return (x @ self.weight) @ self.turn


@pytest.mark.parametrize("exact", [False, True])
def test_large_buffers_live_where_their_module_runs(exact):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Turned(512) for _ in range(6))).eval(), torch.randn(64, 512)
    plan = planned(model, "106MiB", x, exact=exact)
    streamed = {name for names in plan.modules.streamed.values() for name in names}
    assert streamed
    assert not any(name.endswith("turn") for name in streamed)
    for name, home in plan.modules.home.items():
        if name.endswith("turn"):
            assert home == plan.modules.runs_on.get(name.partition(".")[0], "cuda:0")
    with torch.no_grad():
        expected = model(x)
    apply(model, on_threads(plan))
    assert torch.equal(model(x), expected)
    remove(model)


class Around(nn.Module):
    """A large weight of its own, before or after a layer inside."""

    def __init__(self, size, first):
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.randn(size, size) / size**0.5)
        self.inside = nn.Linear(size, size)

    def forward(self, x):
        return self.inside(x @ self.weight) if self.first else self.inside(x) @ self.weight


@pytest.mark.parametrize("there", [("",), ("", ".inside"), (".inside",)])
@pytest.mark.parametrize("first", [False, True])
def test_what_is_inside_a_module_that_runs_elsewhere_runs_there_too(first, there):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 512), Around(512, first)).eval(), torch.randn(4, 512)
    step = step_of(model, x)
    problem = roost.estimate(step.graph, "h200")
    elsewhere = [module in {f"1{part}" for part in there} for module in step.graph.modules]
    placement = problem.placement(np.where(np.array(elsewhere) | step.graph.is_parameter, 0, 1))
    where, rounded = by_modules(problem, placement, model)
    assert where.runs_on == {"1" if "" in there else "1.inside": "cpu:0"}
    assert "1.inside" not in where.streamed
    ran = {problem.cluster.device_names[rounded.device[op]] for op in np.flatnonzero(elsewhere)}
    assert ran == {"cpu:0"}
    with torch.no_grad():
        expected = model(x)
    names = {"cuda:0": "cpu:0", "cpu:0": "cpu:1"}
    apply(model, replace(
        where, main="cpu:0", home={name: names[home] for name, home in where.home.items()},
        runs_on=dict.fromkeys(where.runs_on, "cpu:1"),
    ))  # fmt: skip
    assert torch.equal(model(x), expected)
    remove(model)


class Two(nn.Module):
    """Two large weights, which are brought together, though one op reads each."""

    def __init__(self, size):
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(size, size) / size**0.5) for _ in range(2))

    def forward(self, x):
        return (x @ self.one) @ self.other


@pytest.mark.parametrize("cap", [97, 98, 99, 100, 101, 103])
def test_weights_of_a_module_need_a_window_for_all_of_them(cap):
    torch.manual_seed(0)
    model, x = nn.Sequential(Two(512), nn.Linear(512, 512), Two(512)).eval(), torch.randn(4, 512)
    search = search_of(model, cap * 2**20, x)
    first = search._graph.inputs_of(search._graph.op_names.index("mm"))
    assert {"0.one", "0.other"} <= {search._graph.op_names[op] for op in first}
    plan = search.plan()
    assert plan.timeline.feasible
    with torch.no_grad():
        expected = model(x)
    apply(model, on_threads(plan))
    assert torch.equal(model(x), expected)
    remove(model)


def test_a_hop_is_measured_on_a_gpu_and_a_guess_without_one(monkeypatch):
    monkeypatch.setattr("roost.plan.clusters.hop_seconds", lambda device: 0.002 + device.index)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert hop_of("cpu:0") == 0.0
    assert hop_of("cuda:1") == 1e-4
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert hop_of("cpu:0") == 0.0
    assert hop_of("cuda:1") == 1.002
