"""Checking of models that declare their fields as class annotations, as extensions of scripts do.

    class MyConfig(DeepSpeedConfigModel):
        size: int = 1
        old_size: int = Field(None, json_schema_extra={"deprecated": True, "new_param": "size"})

A default may be a value or what pydantic's ``Field(...)`` returns, in pydantic 1 or 2: then its ``alias``, its bounds
and its ``json_schema_extra`` (pydantic 1: the keywords it does not know) count, too. pydantic itself is not needed.
"""

import difflib
import enum
import inspect
import operator
import re
import types
import typing

from deepspeed._native import DeepSpeedConfigError
from deepspeed.config.errors import config_error
from deepspeed.log import logger

# Names of bounds, as pydantic and the module operator have them -> words.
BOUNDS = {"ge": "at least", "gt": "greater than", "le": "at most", "lt": "less than"}
_MISSING = object()


class Declared:
    """One field: its type, default, other name and what is deprecated about it."""

    def __init__(self, name, annotation, default):
        self.name, self.annotation, self.required = name, annotation, default is _MISSING
        self.alias, self.factory, self.extra, self.bounds = None, None, {}, {}
        self.default = None if self.required else default
        if hasattr(default, "default_factory") and hasattr(default, "alias"):
            self._take(default)

    def _take(self, field):
        """Reads what pydantic's Field() returned."""
        self.alias, self.factory = field.alias, field.default_factory
        extra = getattr(field, "json_schema_extra", None)
        if extra is None:
            others = getattr(field, "extra", None) or {}
            extra = others.get("json_schema_extra", others)
        self.extra = extra if isinstance(extra, dict) else {}
        for item in getattr(field, "metadata", [field]):
            self.bounds.update({key: getattr(item, key) for key in BOUNDS if getattr(item, key, None) is not None})
        nothing = field.default is ... or type(field.default).__name__ in ("PydanticUndefinedType", "UndefinedType")
        self.required, self.default = nothing and self.factory is None, None if nothing else field.default

    def fresh_default(self):
        if self.factory is not None:
            return self.factory()
        return type(self.default)(self.default) if isinstance(self.default, (dict, list)) else self.default


def declared_fields(cls):
    """``{name: Declared}`` of a class, its bases first."""
    fields = {}
    for base in reversed(cls.__mro__):
        hints = typing.get_type_hints(base) if "__annotations__" in vars(base) else {}
        for name in vars(base).get("__annotations__", {}):
            if name.startswith("_") or typing.get_origin(hints[name]) is typing.ClassVar:
                continue
            fields[name] = Declared(name, hints[name], inspect.getattr_static(cls, name, _MISSING))
    return fields


def extra_policy(cls):
    """The rule for unknown keys: "forbid", "ignore" or "allow", from ``model_config`` or pydantic 1's ``Config``."""
    for base in cls.__mro__:
        for policy in (vars(base).get("model_config"), vars(vars(base).get("Config", type))):
            if policy is not None and "extra" in policy:
                return str(getattr(policy["extra"], "value", policy["extra"]))
    return "forbid"


def _refuse(where, value, what):
    raise config_error(f"{where} = {value!r} must be {what}.", [where.partition(".")[2]], value=value)


def _convert_union(where, annotation, value):
    problems = []
    for choice in typing.get_args(annotation):
        if choice is type(None):
            if value is None:
                return None
            continue
        try:
            return convert(where, choice, value)
        except DeepSpeedConfigError as error:
            problems.append(error)
    raise problems[0]


def _convert_container(where, origin, annotation, value):
    inner = typing.get_args(annotation)
    if origin is dict:
        if not isinstance(value, dict):
            _refuse(where, value, "an object")
        return {key: convert(f"{where}.{key}", inner[1], item) for key, item in value.items()} if inner else dict(value)
    if not isinstance(value, (list, tuple, set)):
        _refuse(where, value, "a list")
    kinds = [item for item in inner if item is not Ellipsis]
    kind = kinds[0] if kinds else typing.Any
    return origin(convert(f"{where}[{i}]", kind, item) for i, item in enumerate(value))


# The texts that pydantic reads as an integer.
_WHOLE = re.compile(r"\s*[+-]?\d+(_\d+)*(\.0+)?\s*", re.ASCII)


def _number_of_text(where, annotation, text):
    """The number in ``text`` where pydantic takes it for ``annotation``, with a warning; else ``text``."""
    try:
        if annotation is float:
            number = float(text)
        elif _WHOLE.fullmatch(text):
            number = int(text.partition(".")[0])
        else:
            return text
    except ValueError:
        return text
    logger.warning("%s = %r is a text and is read as %s; write it without quotes.", where, text, number)
    return number


def convert(where, annotation, value):
    """``value`` as the type that ``annotation`` names; DeepSpeedConfigError when it is none."""
    origin = typing.get_origin(annotation)
    if annotation is typing.Any or isinstance(annotation, (str, typing.TypeVar)):
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(where, annotation, value)
    if origin is typing.Literal:
        if value not in typing.get_args(annotation):
            _refuse(where, value, f"one of {list(typing.get_args(annotation))}")
        return value
    if origin in (list, tuple, set, dict) or annotation in (list, tuple, set, dict):
        return _convert_container(where, origin or annotation, annotation, value)
    if not isinstance(annotation, type) or isinstance(value, annotation) and not isinstance(value, bool):
        return value
    if annotation is bool:
        if isinstance(value, bool) or value in (0, 1):
            return bool(value)
        _refuse(where, value, "true or false")
    if annotation in (int, float):
        if isinstance(value, str):
            value = _number_of_text(where, annotation, value)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or (annotation is int and value != value // 1):
            _refuse(where, value, "an integer" if annotation is int else "a number")
        return annotation(value)
    if issubclass(annotation, enum.Enum):
        try:
            return annotation(value)
        except ValueError:
            _refuse(where, value, f"one of {[item.value for item in annotation]}")
    if isinstance(value, dict):
        return annotation(**value)
    if annotation is not object:
        _refuse(where, value, f"a {annotation.__name__}")
    return value


def _checked(where, field, value):
    if value is None and field.default is None:
        return None
    value = convert(where, field.annotation, value)
    for key, bound in field.bounds.items() if isinstance(value, (int, float)) else ():
        if not getattr(operator, key)(value, bound):
            _refuse(where, value, f"{BOUNDS[key]} {bound}")
    return value


def fill(model, data, strict):
    """Sets the attributes of ``model`` from ``data``: checks, defaults, then deprecated names, which forward.

    Unless ``strict``, a value "auto" stands for the default (``replace_method`` takes it as it is).
    """
    cls = type(model).__name__
    fields = declared_fields(type(model))
    names = {**{field.alias: field for field in fields.values() if field.alias}, **fields}
    given = {}
    for key, value in data.items():
        if key not in names:
            _unknown(model, key, value, names)
            continue
        if strict or not (isinstance(value, str) and value == "auto") or key == "replace_method":
            given[names[key].name] = _checked(f"{cls}.{key}", names[key], value)
    for name, field in fields.items():
        if field.required and name not in given:
            raise config_error(f"{cls}.{name} is missing.", [name], value=data)
        # Defaults are checked like values, so that {} may stand for a nested model.
        model.__dict__[name] = given[name] if name in given else _checked(f"{cls}.{name}", field, field.fresh_default())
    for name in given:
        if fields[name].extra.get("deprecated") and given[name] is not None:
            _forward(model, fields, name, given)


def _unknown(model, key, value, names):
    policy = extra_policy(type(model))
    if policy == "forbid":
        near = difflib.get_close_matches(key, names, 1)
        advice = f'Did you mean "{near[0]}"?' if near else f"It has {', '.join(names)}."
        raise config_error(f"{type(model).__name__} has no key {key!r}. {advice}", [key], value=value)
    if policy == "allow":
        model.__dict__[key] = value


def assign(model, name, value):
    """``model.name = value``: a declared field is checked, anything else is an attribute like any."""
    field = declared_fields(type(model)).get(name)
    object.__setattr__(
        model, name, value if field is None else _checked(f"{type(model).__name__}.{name}", field, value)
    )


def _forward(model, fields, name, given):
    extra = fields[name].extra
    target = extra.get("new_param", "")
    logger.warning(
        "%s.%s is deprecated%s. %s",
        type(model).__name__,
        name,
        f", use {target}" if target else "",
        extra.get("deprecated_msg", ""),
    )
    if not target or not extra.get("set_new_param", True):
        return
    path = target.split(".")
    if path[0] in given:
        cls = type(model).__name__
        text = f"{cls}: {name} is the deprecated name of {target}, and both are given."
        raise config_error(text, [name], [AssertionError], value=given[name])
    holder = model
    for part in path[:-1]:
        holder = getattr(holder, part)
    setattr(holder, path[-1], extra.get("new_param_fn", lambda value: value)(given[name]))
