"""Families of random models: the same by seed, different from seed to seed, and every member
computes and learns."""

import dataclasses

import numpy as np
import pytest
import torch

from roost import zoo
from roost.errors import InputError
from roost.zoo.families import cifar10, ptb

FAMILIES = zoo.family_names()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_seed_gives_the_same_members(name):
    assert zoo.family_models(name, 8, 3) == zoo.family_models(name, 8, 3)
    assert zoo.family_models(name, 8, 3)[:2] == zoo.family_models(name, 2, 3)
    assert zoo.family_models(name, 0, 3) == []


@pytest.mark.parametrize("name", FAMILIES)
def test_members_differ_from_each_other_and_from_seed_to_seed(name):
    members = [member for seed in (0, 1) for member in zoo.family_models(name, 16, seed)]
    assert len(set(members)) == 32


@pytest.mark.parametrize("name", FAMILIES)
def test_every_member_computes_and_every_parameter_learns(name):
    for number, member in enumerate(zoo.family_models(name, 8, 0)):
        torch.manual_seed(number)
        settings = member.shrunk()
        model = settings.model()
        loss = model(*settings.inputs(train=True))
        assert loss.isfinite()
        loss.backward()
        unused = [key for key, parameter in model.named_parameters() if parameter.grad is None]
        assert not unused
        assert model(*settings.inputs(train=False)).shape[0] == settings.batch


@pytest.mark.parametrize("name", FAMILIES)
def test_members_build_at_full_size_on_meta(name):
    for member in zoo.family_models(name, 4, 0):
        with torch.device("meta"):
            assert all(parameter.is_meta for parameter in member.model().parameters())
            assert all(tensor.shape[0] == member.batch for tensor in member.inputs(train=True))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_member_exports(name):
    settings = zoo.family_models(name, 1, 5)[0].shrunk()
    torch.export.export(settings.model(), settings.inputs(train=True), strict=False)


def test_shrinking_keeps_the_architecture():
    for member in zoo.family_models("cifar10", 4, 0):
        assert (member.shrunk().normal, member.shrunk().reduction) == (
            member.normal,
            member.reduction,
        )
    for member in zoo.family_models("ptb", 4, 0):
        assert member.shrunk().nodes == member.nodes


def test_random_cells_use_every_op():
    cells = [
        cell
        for member in zoo.family_models("cifar10", 16, 0)
        for cell in (member.normal, member.reduction)
    ]
    assert {op for cell in cells for left, _, right, _ in cell for op in (left, right)} == set(
        cifar10.OPS
    )
    nodes = [node for member in zoo.family_models("ptb", 16, 0) for node in member.nodes]
    assert {activation for _, activation in nodes} == set(ptb.ACTIVATIONS)


def test_a_cell_that_cannot_be_is_named():
    with pytest.raises(InputError, match="node 0 of a cell is"):
        cifar10.Cifar10Family(normal=(("max", 2, "max", 0),))
    with pytest.raises(InputError, match="node 1 of the cell is"):
        ptb.PtbFamily(nodes=((-1, "tanh"), (1, "relu")))


def test_a_recurrent_cell_is_what_its_nodes_say():
    torch.manual_seed(0)
    settings = ptb.PtbFamily(
        nodes=((-1, "tanh"), (0, "identity"), (0, "relu")), batch=2, length=1, hidden=3, vocab=5
    )
    model, (tokens,) = settings.model(), settings.inputs(train=False)

    def node(number, x, carried, activation):
        gate, value = (model.cell.nodes[number].linear.weight @ x).chunk(2)
        return torch.sigmoid(gate) * activation(value) + (1 - torch.sigmoid(gate)) * carried

    for row, token in enumerate(tokens[:, 0]):
        x = model.embed.weight[token]
        first = node(0, torch.cat([x, torch.zeros(3)]), torch.zeros(3), torch.tanh)
        ends = (node(1, first, first, lambda value: value) + node(2, first, first, torch.relu)) / 2
        torch.testing.assert_close(model(tokens)[row, 0], model.embed.weight @ ends)


def test_negative_counts_are_refused():
    with pytest.raises(InputError, match="count is -1"):
        zoo.family_models("nmt", -1, 0)


def test_family_captures_each_member(monkeypatch):
    pytest.importorskip("roost.frontends.torch")
    draw = ptb.PtbFamily.draw.__func__
    monkeypatch.setattr(
        ptb.PtbFamily, "draw", classmethod(lambda cls, rng: draw(cls, rng).shrunk())
    )
    graphs = zoo.family("ptb", 2, 7, train=False)
    assert [graph.name for graph in graphs] == ["ptb_7_000", "ptb_7_001"]
    assert len({graph.num_ops for graph in graphs}) == 2


def test_drawing_takes_a_generator():
    first = ptb.PtbFamily.draw(np.random.default_rng(1))
    assert dataclasses.asdict(first) == dataclasses.asdict(
        ptb.PtbFamily.draw(np.random.default_rng(1))
    )
