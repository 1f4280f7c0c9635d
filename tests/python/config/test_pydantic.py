"""Errors of section models are pydantic's where pydantic is imported; classes written for pydantic work as they are."""

import pickle
import subprocess
import sys

import pytest

from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError, DeepSpeedConfigModel
from deepspeed.config.errors import config_error
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from refusals import refused

WRONG = [
    lambda: DeepSpeedZeroConfig(stag=1),
    lambda: DeepSpeedZeroConfig(stage=2, offload_optimizer={"ratio": 0.5}),
    lambda: DeepSpeedConfig({"train_batch_size": 8, "fp16": {"loss_scale": -1}}),
    lambda: DeepSpeedConfig({"train_batch_size": 8, "zero_optimization": {"stage": 4}}),
    lambda: DeepSpeedConfig({"train_batch_size": 8, "sparse_attention": {"mode": "other"}}),
]


@pytest.fixture
def pydantic():
    """pydantic 1, or a pydantic 2 whose ValidationError is not final: since 2.10."""
    module = pytest.importorskip("pydantic")
    if module.VERSION.startswith("2.") and int(module.VERSION.split(".")[1]) < 10:
        pytest.skip(f"pydantic {module.VERSION} has a final ValidationError")
    return module


@pytest.mark.parametrize("make", WRONG)
def test_clients_catch_validation_error(pydantic, make):
    caught = refused(pydantic.ValidationError, "", make)
    assert isinstance(caught, DeepSpeedConfigError)
    try:
        make()
    except pydantic.ValidationError as error:  # `except` asks the class itself, no hook of it
        assert str(error) == str(caught)


def test_what_a_validation_error_tells(pydantic):
    caught = refused(pydantic.ValidationError, "", DeepSpeedConfig, {"train_batch_size": 8, "fp16": {"loss_scale": -1}})
    first = caught.errors()[0]
    assert first["loc"] == ("fp16", "loss_scale") and "must be at least 0" in first["msg"]
    assert "fp16.loss_scale = -1 must be at least 0" in str(caught)
    config = {"train_batch_size": 8, "fp16": {"loss_scale": -1}, "mine": lambda: 1}  # the error leaves "mine" behind
    caught = refused(pydantic.ValidationError, "", DeepSpeedConfig, config)
    again = pickle.loads(pickle.dumps(caught))
    assert str(again) == str(caught) and isinstance(again, pydantic.ValidationError)


def test_a_model_with_fields_of_pydantic(pydantic):
    extra = {"deprecated": True, "new_param": "param"}

    class Mine(DeepSpeedConfigModel):
        param: int = pydantic.Field(0, alias="param_alias", ge=0)
        needed: int = pydantic.Field(...)
        made: list = pydantic.Field(default_factory=list)
        old: int = pydantic.Field(None, json_schema_extra=extra)

    assert Mine(param_alias=2, needed=1).param == 2 and Mine(old=3, needed=1).param == 3
    for data, words in [
        ({"param": 1}, "needed is missing"),
        ({"param": -1, "needed": 1}, "at least 0"),
        ({"needed": 1, "parm": 2}, 'Did you mean "param"'),
        ({"needed": 1, "param": 2, "old": 2}, "both are given"),
    ]:
        refused(pydantic.ValidationError, words, Mine, **data)
    mine = Mine(needed=1)
    with pytest.raises(pydantic.ValidationError, match="an integer"):
        mine.param = "x"
    mine.param = 5e8
    assert mine.param == 500_000_000


def test_keywords_that_pydantic_1_keeps_in_extra(pydantic):
    if not pydantic.VERSION.startswith("1."):
        pytest.skip("pydantic 2 takes json_schema_extra")

    class Mine(DeepSpeedConfigModel):
        param: int = 0
        old: int = pydantic.Field(None, deprecated=True, new_param="param")

    assert Mine(old=3).param == 3


class _Final(type):
    def __new__(mcs, name, bases, body):
        if any(isinstance(base, _Final) for base in bases):
            raise TypeError("type 'ValidationError' is not an acceptable base type")
        return super().__new__(mcs, name, bases, body)


class _FinalError(ValueError, metaclass=_Final):
    pass


class _NoConstructor(ValueError):
    @classmethod
    def from_exception_data(cls, title, line_errors):
        raise TypeError("No constructor defined")


@pytest.mark.parametrize("kind", [_FinalError, _NoConstructor])
def test_a_validation_error_that_cannot_be_mixed_in_is_left_out(monkeypatch, kind):
    """Early releases of pydantic 2: our own classes are raised, as without pydantic."""
    monkeypatch.setitem(sys.modules, "pydantic", type("module", (), {"ValidationError": kind}))
    assert type(config_error("text")) is DeepSpeedConfigError
    assert isinstance(config_error("text", kinds=[AssertionError]), AssertionError)


def test_another_validation_error_is_mixed_in(monkeypatch):
    """The way of pydantic 2, wherever the tests run."""

    class Validation(ValueError):
        @classmethod
        def from_exception_data(cls, title, line_errors):
            self = cls(title)
            self.found = [line["loc"] for line in line_errors]
            return self

    core = type("module", (), {"PydanticCustomError": lambda kind, text, context: (kind, context["reason"])})
    monkeypatch.setitem(sys.modules, "pydantic", type("module", (), {"ValidationError": Validation}))
    monkeypatch.setitem(sys.modules, "pydantic_core", core)
    caught = refused(Validation, "", DeepSpeedZeroConfig, stag=1)
    assert caught.found == [("zero_optimization", "stag")]
    assert isinstance(caught, DeepSpeedConfigError) and 'Did you mean "stage"' in str(caught)


def test_pydantic_is_not_imported_for_it():
    code = (
        "import sys, deepspeed\n"
        "from deepspeed.config import DeepSpeedConfig, DeepSpeedConfigError\n"
        "try:\n    DeepSpeedConfig({'fp16': 3})\nexcept DeepSpeedConfigError:\n    pass\n"
        "sys.exit('pydantic' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
