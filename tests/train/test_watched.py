"""A use of a watched object is noticed through every reference to it, and afterwards the object is as before."""

import copy

import pytest
import torch
from torch import nn

from tpukit.train.watched import Watch


class Owner:
    number = 1


USES = {
    "an operation": lambda one: one + 1,
    "an operand on the right": lambda one: torch.ones(2) - one,
    "a function": lambda one: torch.sum(one),
    "a comparison": lambda one: one == 1,
    "a method": lambda one: one.detach(),
    "its values": lambda one: one.tolist(),
    "a copy": copy.deepcopy,
    "a part": lambda one: one[0],
    "an assignment": lambda one: one.data.fill_(3),
    "another tensor that takes it": lambda one: torch.zeros(2).copy_(one),
}


@pytest.mark.parametrize("kind", [nn.Parameter, torch.Tensor])
@pytest.mark.parametrize("use", USES)
def test_every_use_of_a_tensor_is_noticed_and_does_what_it_does(kind, use):
    tensor, uses = torch.ones(2), []
    tensor = nn.Parameter(tensor) if kind is nn.Parameter else tensor
    expected = USES[use](copy.deepcopy(tensor))

    def on_use():
        uses.append(1)
        watch.end()

    watch = Watch(on_use)
    watch.begin([tensor, tensor])
    assert torch.equal(torch.as_tensor(USES[use](tensor)), torch.as_tensor(expected))
    assert uses == [1]
    assert type(tensor) is kind


def test_a_watch_that_goes_on_notices_reads_and_calculates_as_before():
    count, uses = torch.tensor(3.0), []
    watch = Watch(lambda: uses.append(1))
    watch.begin([count])
    assert int(count) == 3
    assert uses
    watch.end()
    assert type(count) is torch.Tensor


def test_an_attribute_of_an_object_is_noticed_and_its_own_class_comes_back():
    owner, uses = Owner(), []
    watch = Watch(lambda: uses.append(1))
    watch.begin([owner])
    assert owner.number == 1
    assert isinstance(owner, Owner)
    assert uses
    watch.end()
    assert type(owner) is Owner


def test_an_object_whose_class_cannot_be_exchanged_is_left_alone():
    watch = Watch(lambda: None)
    watch.begin([3])
    watch.end()
