"""Batches are found in the inputs of a model, and cut into microbatches or refused in words."""

import pytest
import torch
from torch import nn

from roost.errors import InputError
from roost.plan.batches import batch_split, bound_call, call_of, named_inputs


class Takes(nn.Module):
    def forward(self, words, mask=None, *, labels=None):
        return words


def inputs(words=(8, 3), **shapes):
    return {name: torch.zeros(shape) for name, shape in {"words": words, **shapes}.items()}


def test_the_batch_is_the_first_dimension_that_inputs_share():
    found = batch_split(inputs(labels=(8,), mask=(1, 3), scale=(), positions=(3,)))
    assert found.size == 8
    assert found.dims == {"words": 0, "labels": 0, "mask": None, "scale": None, "positions": None}
    assert found.shared == ("mask", "scale", "positions")


def test_batch_dims_says_it_by_name_or_number():
    found = batch_split(inputs((3, 8), table=(8, 8)), {0: 1, "table": None})
    assert (found.size, found.dims) == (8, {"words": 1, "table": None})
    assert batch_split(inputs((3, 8), labels=(8,)), {"words": -1}).dims == {"words": 1, "labels": 0}


@pytest.mark.parametrize(
    ("shapes", "dims", "said"),
    [
        ({"words": ()}, None, "no input has a batch dimension"),
        ({"mask": (3,)}, None, r"unclear: 'words' \[8, 3\], 'mask' \[3\].*\"mask\": None"),
        ({"mask": (5, 5), "bias": (5,)}, None, "unclear"),
        ({"words": (0, 3)}, None, "no samples"),
        ({"labels": (4,)}, {"words": 0, "labels": 0}, "batches of 4 and 8"),
        ({}, {"wrods": 0}, "wrods.*words"),
        ({}, {1: 0}, "'1'"),
        ({}, {"words": 2}, "one of its dimensions, or None"),
        ({}, {"words": True}, "one of its dimensions"),
        ({}, [0], "by input"),
    ],
)
def test_an_unclear_batch_is_refused(shapes, dims, said):
    with pytest.raises(InputError, match=said):
        batch_split(inputs(**shapes), dims)


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (16, "is 16, but the batch has 12 samples"),
        (5, "Give one of 1, 2, 3, 4, 6, 12"),
        (0, "1 or more"),
        (True, "1 or more"),
        (2.0, "1 or more"),
    ],
)
def test_a_number_of_microbatches_that_does_not_divide_is_refused(count, said):
    with pytest.raises(InputError, match=said):
        batch_split(inputs((12, 3))).check_count(count)


def test_microbatches_are_the_samples_in_order():
    words, mask = torch.arange(24).view(8, 3), torch.ones(1, 3)
    found = batch_split({"words": words, "mask": mask})
    parts = found.parts({"words": words, "mask": mask}, 4)
    assert torch.equal(torch.cat(parts["words"]), words)
    assert [len(part) for part in parts["words"]] == [2] * 4
    assert parts["mask"] == [mask]


def test_the_example_of_a_microbatch_has_the_form_of_the_batch():
    words, labels = torch.zeros(8, 3), torch.zeros(8, 5)
    bound = bound_call(Takes(), (), {"labels": labels, "words": words})
    args, kwargs = batch_split(named_inputs(bound)).microbatch(bound, 4)
    assert [value.shape for value in args] == [(2, 3)]
    assert kwargs["labels"].shape == (2, 5)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((5, 3), "has 5 samples; the trainer was made for batches of 8.*drop_last"),
        ((8, 4), r"is \[8, 4\]; the example batch had \[8, 3\]"),
        ((8, 3, 1), r"is \[8, 3, 1\]"),
    ],
)
def test_a_later_batch_of_another_shape_is_refused(shape, said):
    with pytest.raises(InputError, match=said):
        batch_split(inputs()).parts(inputs(shape), 2)


def test_a_batch_that_lacks_a_tensor_is_refused():
    with pytest.raises(InputError, match="missing or unknown: labels"):
        batch_split(inputs(labels=(8,))).parts(inputs(), 2)


def test_inputs_are_named_as_exporting_names_them():
    assert list(named_inputs(bound_call(Takes(), (1, {"a": 2, "b": [3]}), {"labels": 4}))) == [
        "words",
        "mask_a",
        "mask_b_0",
        "labels",
    ]
    with pytest.raises(InputError, match=r"Takes\.forward: missing"):
        bound_call(Takes(), (), {})


def test_one_tuple_or_dict_is_a_whole_batch():
    assert call_of(((1, 2),), {}) == ((1, 2), {})
    assert call_of(({"words": 1},), {}) == ((), {"words": 1})
    assert call_of((1, 2), {}) == ((1, 2), {})
