"""DeepSpeedConfigModel as a base of classes that declare fields by annotation."""

import copy
import enum
import pickle
from types import SimpleNamespace
from typing import Any, Dict, List, Literal, Optional, Union

import pytest
import torch

from deepspeed.config import DeepSpeedConfigError, DeepSpeedConfigModel
from refusals import refused


def declared(default=None, alias=None, extra=None, factory=None, **bounds):
    """An object like that of pydantic's Field(...), as far as it is read."""
    return SimpleNamespace(
        default=default,
        alias=alias,
        json_schema_extra=extra,
        default_factory=factory,
        metadata=[SimpleNamespace(**{key: value}) for key, value in bounds.items()],
    )


class Colour(str, enum.Enum):
    red = "red"


class Inner(DeepSpeedConfigModel):
    depth: int = 0


class Model(DeepSpeedConfigModel):
    size: int = 1
    share: float = declared(0.5, ge=0.0, le=1.0)
    names: List[str] = []
    table: Dict[str, int] = {}
    colour: Colour = Colour.red
    inner: Inner = declared(factory=Inner)
    nested: Inner = {}
    either: Union[str, int] = "auto"
    maybe: Optional[bool] = None
    word: Literal["a", "b"] = "a"
    free: Any = None
    other: int = declared(3, alias="other_name")
    old_size: int = declared(None, extra={"deprecated": True, "new_param": "size"})
    old_depth: int = declared(
        None, extra={"deprecated": True, "new_param": "inner.depth", "new_param_fn": lambda value: value * 2}
    )
    replace_method: str = ""


def test_defaults_are_fresh():
    first, second = Model(), Model()
    first.names.append("x")
    assert second.names == [] and second.inner.depth == 0 and second.share == 0.5


def test_defaults_are_checked_like_values():
    first, second = Model(), Model()
    first.nested.depth = 4
    assert isinstance(second.nested, Inner) and second.nested.depth == 0

    class Wrong(DeepSpeedConfigModel):
        size: int = "many"

    refused(DeepSpeedConfigError, "Wrong.size = 'many' must be an integer", Wrong)
    assert Wrong(size=3).size == 3


def test_extra_keys_as_the_class_wants_them():
    class Keeps(DeepSpeedConfigModel):
        model_config = {"extra": "allow"}
        size: int = 1

    class Drops(DeepSpeedConfigModel):
        class Config:
            extra = "ignore"

        size: int = 1

    class KeepsToo(Keeps):
        other: int = 2

    assert Keeps(free=3).model_dump() == {"free": 3, "size": 1}
    assert KeepsToo(free=3).free == 3
    assert Drops(free=3).model_dump() == {"size": 1}
    refused(DeepSpeedConfigError, "siz", Model, siz=1)


def test_assignments_are_checked():
    model = Model()
    model.size = 5e8
    assert model.size == 500_000_000 and isinstance(model.size, int)
    model.inner = {"depth": 3}
    assert isinstance(model.inner, Inner) and model.inner.depth == 3
    for name, value in [("size", "x"), ("share", 2.0), ("colour", "blue"), ("inner", {"dept": 1})]:
        refused(DeepSpeedConfigError, "", setattr, model, name, value)
    model.note = "anything else is an attribute like any"
    assert model.size == 500_000_000 and model.note


def test_a_dtype_is_dumped_as_text():
    class Typed(DeepSpeedConfigModel):
        dtype: torch.dtype = torch.float16

    assert Typed(dtype=torch.bfloat16).model_dump() == {"dtype": "torch.bfloat16"}
    assert Typed.serialize_torch_dtype(torch.int8) == "torch.int8"


def test_values_are_converted():
    model = Model(size=5e8, share=1, names=("a",), inner={"depth": 2}, colour="red", other_name=4, either=3, maybe=True)
    assert model.size == 500_000_000 and isinstance(model.size, int)
    assert isinstance(model.share, float) and model.names == ["a"]
    assert model.inner.depth == 2 and model.colour is Colour.red
    assert (model.other, model.either, model.maybe) == (4, 3, True)


@pytest.mark.parametrize(
    "data, words",
    [
        ({"siz": 1}, 'Did you mean "size"'),
        ({"size": "x"}, "an integer"),
        ({"size": 1.5}, "an integer"),
        ({"size": True}, "an integer"),
        ({"share": 2.0}, "at most 1.0"),
        ({"names": "x"}, "a list"),
        ({"names": [1]}, r"names\[0\]"),
        ({"table": {"a": "x"}}, "table.a"),
        ({"colour": "blue"}, "red"),
        ({"word": "c"}, "one of"),
        ({"inner": {"dept": 1}}, "depth"),
        ({"maybe": "yes"}, "true or false"),
        ({"size": 2, "old_size": 3}, "both are given"),
    ],
)
def test_wrong_values(data, words):
    refused(DeepSpeedConfigError, words, Model, **data)


def test_deprecated_names_forward():
    assert Model(old_size=7).size == 7 and Model(old_depth=7).inner.depth == 14
    dumped = Model(size=3).model_dump()
    assert dumped["old_size"] is None and Model(**dumped).size == 3  # a null gives nothing


def test_auto():
    assert Model(size="auto").size == 1 and Model(replace_method="auto").replace_method == "auto"
    refused(DeepSpeedConfigError, "", Model, strict=True, size="auto")


def test_copies_and_dicts():
    model = Model(size=2)
    assert copy.deepcopy(model) == model == pickle.loads(pickle.dumps(model))
    assert model.model_dump()["inner"] == {"depth": 0}
    assert model.model_copy(update={"size": 9}).size == 9 and model.size == 2


def test_fields_of_pydantic():
    pydantic = pytest.importorskip("pydantic", minversion="2")

    class Mine(DeepSpeedConfigModel):
        param: int = pydantic.Field(0, alias="param_alias", ge=0)
        needed: int = pydantic.Field()
        made: list = pydantic.Field(default_factory=list)

    assert Mine(param_alias=2, needed=1).param == 2
    refused(ValueError, "needed is missing", Mine, param=1)
    refused(ValueError, "at least 0", Mine, param=-1, needed=1)
