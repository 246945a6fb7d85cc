"""A use of a watched object is noticed through every reference to it, and afterwards the object is as before."""

import copy
import threading

import pytest
import torch
from torch import nn

from tpukit.training.watched import watching


class Owner:
    number = 1


class Labelled(torch.Tensor):
    """A tensor whose class takes part in operations."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        if isinstance(result, Labelled):
            result.is_labelled = True
        return result


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
    tensor = torch.ones(2)
    tensor = nn.Parameter(tensor) if kind is nn.Parameter else tensor
    expected = USES[use](copy.deepcopy(tensor))
    with watching([tensor, tensor]) as found:
        assert not found.is_used
        result = USES[use](tensor)
        assert found.is_used
    assert torch.equal(torch.as_tensor(result), torch.as_tensor(expected))
    assert type(tensor) is kind


def test_an_operation_on_a_tensor_of_another_class_has_a_result_of_that_class():
    tensor = torch.ones(2).as_subclass(Labelled)
    with watching([tensor]) as found:
        result = tensor + 1
    assert found.is_used
    assert type(result) is Labelled
    assert result.is_labelled


def test_an_operation_in_another_thread_does_not_count_and_does_what_it_does():
    tensor = torch.ones(2)
    results = []
    with watching([tensor]) as found:
        thread = threading.Thread(target=lambda: results.append(tensor + 1))
        thread.start()
        thread.join()
    assert not found.is_used
    assert results[0].tolist() == [2, 2]


def test_a_count_gives_its_number_while_it_is_watched():
    count = torch.tensor(3.0)
    with watching([count]) as found:
        assert int(count) == 3
    assert found.is_used
    assert type(count) is torch.Tensor


def test_an_attribute_of_an_object_is_noticed_and_its_own_class_comes_back():
    owner = Owner()
    with watching([owner]) as found:
        assert owner.number == 1
        assert isinstance(owner, Owner)
    assert found.is_used
    assert type(owner) is Owner


def test_the_own_class_comes_back_after_an_error():
    owner = Owner()
    with pytest.raises(KeyError), watching([owner]):
        raise KeyError
    assert type(owner) is Owner


def test_a_use_by_another_thread_does_not_count():
    owner = Owner()
    with watching([owner]) as found:
        thread = threading.Thread(target=lambda: owner.number)
        thread.start()
        thread.join()
    assert not found.is_used


class WithSlots:
    __slots__ = ("number",)


class Guarded:
    number = 1

    def __setattr__(self, name, value):
        raise AttributeError(name)


@pytest.mark.parametrize("kind", [WithSlots, Guarded])
def test_slots_and_a_class_that_refuses_attributes_can_be_watched(kind):
    one = kind()
    with watching([one]) as found:
        getattr(one, "number", None)
    assert found.is_used
    assert found.unwatched == []
    assert type(one) is kind


class NotDerived:
    def __init_subclass__(cls):
        raise RuntimeError("final")


@pytest.mark.parametrize("one", [3, iter(()), NotDerived()], ids=["an int", "of C", "final"])
def test_an_object_whose_class_cannot_be_exchanged_is_named_and_left_alone(one):
    kind = type(one)
    with watching([one]) as found:
        assert type(one) is kind
    assert found.unwatched == [kind.__name__]
    assert not found.is_used
