"""Section objects: attributes over the values of one section of the configuration."""

import copy
import sys

import torch

from deepspeed._native import _C
from deepspeed.config.annotated import assign, fill
from deepspeed.config.errors import config_error, raise_if_broken
from deepspeed.config.read import read

_layouts = {}


def layout(root, path=""):
    """``{key: {"aliases", "fields", "default"}}`` of a section of the schema; ``fields`` is None for plain keys."""
    if root not in _layouts:
        _layouts[root] = _C.config.layout(root)
    fields = _layouts[root]
    for name in path.split(".") if path else ():
        fields = fields[name]["fields"]
    return fields


class DeepSpeedConfigModel:
    """The base of all section objects: attributes, conversion to a dict, equality, copies, pickling.

    A subclass declares fields as annotations (see annotated.py); unknown keys and wrong types are errors.
    ``strict``: "auto" is a value like any other instead of standing for the default. A subclass whose ``model_config``
    has ``extra`` "allow" or "ignore" keeps or drops unknown keys. Errors are DeepSpeedConfigErrors, and
    ``pydantic.ValidationError``s where pydantic is imported (errors.py).
    """

    model_config = {"extra": "forbid", "validate_assignment": True, "populate_by_name": True}

    def __init__(self, strict=False, **data):
        fill(self, data, strict)

    def __setattr__(self, name, value):
        assign(self, name, value)

    @staticmethod
    def serialize_torch_dtype(dtype):
        """A torch.dtype as the text that a configuration holds: "torch.float16"."""
        return str(dtype)

    def _items(self):
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def model_dump(self, **ignored):
        """The values as plain dicts and lists, under the names of the configuration file; a ``dtype`` as text."""
        dumped = {key: _plain(value) for key, value in self._items().items()}
        if isinstance(dumped.get("dtype"), torch.dtype):
            dumped["dtype"] = self.serialize_torch_dtype(dumped["dtype"])
        return dumped

    def dict(self, **ignored):
        return self.model_dump()

    def model_copy(self, update=None, deep=False):
        other = copy.deepcopy(self) if deep else copy.copy(self)
        for key, value in (update or {}).items():
            setattr(other, key, value)
        return other

    def get(self, key, default=None):
        return getattr(self, key, default)

    def __getitem__(self, key):
        try:
            return getattr(self, key)
        except AttributeError:
            raise KeyError(key) from None

    def __contains__(self, key):
        return key in self._items()

    def __eq__(self, other):
        if isinstance(other, DeepSpeedConfigModel):
            return self.model_dump() == other.model_dump()
        return self.model_dump() == other if isinstance(other, dict) else NotImplemented

    __hash__ = None

    def _shown(self, items):
        """Values of fields as texts about this object show them: secrets are hidden."""
        return items

    def __repr__(self):
        items = {key: value for key, value in self._items().items() if not isinstance(value, DeepSpeedConfigModel)}
        items = {**self._items(), **self._shown(items)}
        inside = ", ".join(f"{key}={value!r}" for key, value in items.items())
        return f"{type(self).__name__}({inside})"


def _plain(value):
    if isinstance(value, DeepSpeedConfigModel):
        return value.model_dump()
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


class ConfigSection(DeepSpeedConfigModel):
    """One section of the schema. Subclasses name it with PATH and can then be made from keywords, which are checked.

    CASTS turns a value into the type that scripts know (an Enum, a Path); CHILDREN gives nested sections a class.
    Keys with several names have an attribute for each.
    """

    ROOT = "training"
    PATH = None
    CASTS = {}
    CHILDREN = {}

    def __init__(self, strict=False, **data):
        """``strict``: "auto" is a value like any other instead of standing for the default."""
        if self.PATH is None:
            raise TypeError("ConfigSection is made by DeepSpeedConfig; use a class that names its section.")
        given = data
        for name in reversed(self.PATH.split(".")):
            given = {name: given}
        native = read(given, root=self.ROOT, strict=False, sections_only=True)
        if strict:
            _refuse_auto(data, self.PATH)
        raise_if_broken(native, built_only=False)
        values = native.values()
        for name in self.PATH.split("."):
            values = values[name]
        self._fill(values, layout(self.ROOT, self.PATH))

    @classmethod
    def from_values(cls, values, fields):
        """Made from resolved values, without checking them again."""
        self = cls.__new__(cls)
        self._fill(values, fields)
        return self

    def _shown(self, items):
        known = layout(self.ROOT, self.PATH) if self.PATH else {}
        hidden = {key for key in items if items[key] and known.get(key, {}).get("secret")}
        tables = {key: _C.config.masked(value) for key, value in items.items() if type(value) is dict}
        return {**items, **tables, **dict.fromkeys(hidden, "***")}

    def _fill(self, values, fields):
        aliases = {}
        for key, value in values.items():
            known = fields.get(key)
            if known:
                aliases.update((alias, key) for alias in known["aliases"])
                if known["fields"] and isinstance(value, dict):
                    value = self.CHILDREN.get(key, ConfigSection).from_values(value, known["fields"])
                elif key in self.CASTS and value is not None:
                    value = self.CASTS[key](value)
            self.__dict__[key] = value
        self.__dict__["_aliases"] = aliases

    def __getattr__(self, name):
        key = self.__dict__.get("_aliases", {}).get(name)
        if key is None:
            raise AttributeError(f"{type(self).__name__} has no key {name!r}")
        return self.__dict__[key]

    def __setattr__(self, name, value):
        self.__dict__[self.__dict__.get("_aliases", {}).get(name, name)] = value


def section(name, path, root="training", **members):
    """The class ``name`` of the section at ``path``, for sections of which scripts know no more than the class."""
    members = {"ROOT": root, "PATH": path, "__module__": sys._getframe(1).f_globals["__name__"], **members}
    return type(name, (ConfigSection,), members)


def _refuse_auto(data, path):
    for key, value in data.items():
        if value == "auto":
            text = f'{path}.{key} = "auto" is not a value here, because strict is set.'
            raise config_error(text, [f"{path}.{key}"], value=value)
