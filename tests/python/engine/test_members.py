"""Members that an engine has from its parts: what a subclass or a client replaces is asked, by the parts, too."""

import inspect

import pytest
import torch

from deepspeed import DeepSpeedEngine, PipelineEngine
from deepspeed.engine.members import Parts, member, run_hooks
from refusals import refused
from runs import take_step

CONFIG = {
    "train_batch_size": 4,
    "gradient_accumulation_steps": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
    "zero_optimization": {"stage": 1},
}


class Empty:
    """A package without files."""

    __path__, __name__ = (), "empty"


counted = Parts()


@counted.add("_counter")
class Counter:
    def __init__(self, owner):
        self.owner, self.count = owner, 0

    @member
    def add(self, more=1):
        """Adds."""
        self.count += more
        return self.owner.total

    @property
    @member
    def total(self):
        """All of it."""
        return self.count

    @total.setter
    def total(self, value):
        self.count = value

    @staticmethod
    @member
    def zero():
        return 0

    def hidden(self):
        return 1


@counted.compose(Empty)
class Owner:
    def __init__(self):
        self._parts.make(self)


def test_a_part_brings_members():
    owner, other = Owner(), Owner()
    assert owner.add() == 1 and owner.add(more=2) == 3 and other.total == 0 and Owner.zero() == owner.zero() == 0
    owner.total = 7
    assert owner.total == 7 and owner._counter.count == 7
    assert str(inspect.signature(Owner.add)) == "(self, more=1)" and Owner.add.__doc__ == "Adds."
    assert Owner.total.__doc__ == "All of it." and not hasattr(owner, "hidden")


def test_a_member_has_one_place():
    with pytest.raises(AssertionError, match=r"add is in a part \(Counter\) and in Both"):
        own = Parts()
        own.add("_counter")(Counter)

        @own.compose(Empty)
        class Both:
            def add(self):
                return 1


def test_parts_of_a_base_go_first_and_an_order_before_that():
    calls, base = [], Parts()

    def part(parts, name, order=0):
        class One:
            def __init__(self, owner):
                self.name = name

            def start(self):
                calls.append(self.name)

        parts.add(name, order)(One)

    own = Parts(base)
    for parts, name, order in ((own, "c", 0), (base, "b", 0), (base, "z", 1), (own, "a", -1)):
        part(parts, name, order)

    @base.compose(Empty)
    class Base:
        def __init__(self):
            self._parts.make(self)

    @own.compose(Empty)
    class Derived(Base):
        pass

    for made, expected in ((Base(), ["b", "z"]), (Derived(), ["a", "b", "c", "z"])):
        calls.clear()
        run_hooks(made, "start")
        run_hooks(made, "stop")
        assert calls == expected
    refused(AssertionError, "two parts are called b", part, own, "b")


@pytest.fixture
def engine():
    engines = []

    def make(cls=DeepSpeedEngine, **more):
        engines.append(cls(None, torch.nn.Linear(2, 1), config={**CONFIG, **more}))
        return engines[-1]

    yield make
    for one in engines:
        one.destroy()


def trained(engine):
    before = engine.module.weight.detach().clone()
    take_step(engine, engine(torch.ones(1, 2)).sum())
    return not torch.equal(before, engine.module.weight)


class Pipeline(DeepSpeedEngine):
    """Overrides as pipeline engines do."""

    calls = ()

    def is_gradient_accumulation_boundary(self):
        return True

    def forward(self, *inputs):
        self.calls += ("forward",)
        return super().forward(*inputs)

    def backward(self, loss, **kwargs):
        self.calls += ("backward",)
        return super().backward(loss, **kwargs)

    def gradient_accumulation_steps(self):
        return 2


def test_a_subclass_is_asked(engine):
    assert not trained(engine())
    made = engine(Pipeline)
    assert trained(made) and made.calls == ("forward", "backward") and made.global_steps == 1
    assert made.get_batch_info()[2] == 2 and float(made.losses or 0) == 0


def test_what_a_client_replaces_on_one_engine_is_asked(engine):
    made, other = engine(), engine()
    seen = []
    original = made.backward
    made.backward = lambda loss, **kwargs: seen.append(1) or original(loss, **kwargs)
    made.is_gradient_accumulation_boundary = lambda: True
    assert trained(made) and seen == [1] and not trained(other)
    made._zero3_consolidated_16bit_state_dict = lambda exclude_frozen_parameters: exclude_frozen_parameters
    assert made._consolidated_16bit_state_dict(True) is True


def test_engines_are_made_of_parts_alone():
    """A pipeline's engine has no other bases; it has the parts of every engine, and brings members of its own."""
    assert PipelineEngine.__bases__ == (DeepSpeedEngine,)
    every, own = ([name for _, name, _ in cls._parts.rows()] for cls in (DeepSpeedEngine, PipelineEngine))
    assert set(every) < set(own) and len(own) == len(set(own))
    assert hasattr(PipelineEngine._exec_schedule, "engine_member") and not hasattr(DeepSpeedEngine, "_exec_schedule")


def test_the_engine_itself_is_small():
    own = [name for name, value in vars(DeepSpeedEngine).items() if inspect.isfunction(value)]
    mine = [name for name in own if not hasattr(getattr(DeepSpeedEngine, name), "engine_member")]
    defined = [name for name in mine if getattr(DeepSpeedEngine, name).__code__.co_filename.endswith("/engine.py")]
    assert len(own) > 45 and len(defined) <= 10, defined
