"""Tensors inside objects of any class."""

import types

import torch

from deepspeed.zero.nested import tensors_within


class Slots:
    __slots__ = ("a", "missing")

    def __init__(self, a):
        self.a = a


class Box:
    shared = torch.zeros(9)  # of the class, no result of anybody

    def __init__(self, **held):
        self.__dict__.update(held)


def found(item):
    return [float(t) for t in tensors_within(item)]


def test_attributes_slots_and_circles():
    one, two, three = (torch.tensor(float(i)) for i in (1, 2, 3))
    box = Box(x=one, y=[Slots(two)], name="text", number=3)
    box.me = {"again": box}
    assert found(box) == [1.0, 2.0] and found((three, Box(inner=types.SimpleNamespace(v=two)))) == [3.0, 2.0]
    assert found(None) == found("text") == found(7) == []


def test_half_the_program_is_not_searched():
    module = torch.nn.Linear(2, 2)
    assert found(Box(module=module, function=found, kind=Box, package=torch)) == []
    assert list(tensors_within(module)) == []


def test_a_dict_with_attributes_of_its_own():
    class Output(dict):
        pass

    output = Output(a=torch.tensor(1.0))
    output.extra = torch.tensor(2.0)
    output.a = output["a"]  # as Hugging Face's outputs have it
    assert found(output) == [1.0, 2.0]
