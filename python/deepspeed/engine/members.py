"""How the engine class gets its public members: from the parts that an engine holds, and from tables of accessors.

A part is an object that an engine makes for itself. What its class marks with ``@member`` is a member of the engine,
too, which hands on to the part. Parts call each other's members through the engine, so that subclasses and clients who
replace a method of one engine are asked.
"""

import functools
import operator


def member(function):
    """Marks a function of a part (below ``@property`` or ``@staticmethod``) as a member of the engine."""
    function.engine_member = True
    return function


def holds(**parts):
    """Class decorator: ``make_parts`` makes a part of each class under its name; their members are the class's, too."""

    def add(cls):
        cls._parts = {**getattr(cls, "_parts", {}), **parts}
        for name, part in parts.items():
            for key, value in vars(part).items():
                if getattr(_function_of(value), "engine_member", False):
                    _put(cls, key, _handed_on(name, key, value), f"a part ({part.__name__})")
        return cls

    return add


def make_parts(engine):
    """Makes the parts of ``engine``, in their order."""
    for name, part in engine._parts.items():
        setattr(engine, name, part(engine))


def _function_of(value):
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _handed_on(part, name, value):
    if isinstance(value, staticmethod):
        return value
    if isinstance(value, property):
        path = operator.attrgetter(f"{part}.{name}")

        def write(self, new):
            setattr(getattr(self, part), name, new)

        return property(path, None if value.fset is None else write, doc=value.__doc__)

    @functools.wraps(value)
    def method(self, *args, **kwargs):
        return getattr(getattr(self, part), name)(*args, **kwargs)

    return method


def answers_from(paths, below=None):
    """Class decorator: a method for each name, which returns what lies at its path below an attribute of the object, or
    in the object itself. A path is ``"section.key"``, or ``(path, value)`` where the section may be None: the value
    stands for what is in it."""

    def add(cls):
        for name, path in paths.items():
            path, *default = (path,) if isinstance(path, str) else path
            _put(cls, name, _accessor(cls, name, path if below is None else f"{below}.{path}", default), "the table")
        return cls

    return add


def _accessor(cls, name, path, default):
    parts = path.split(".")

    def accessor(self):
        value = self
        for part in parts:
            if value is None and default:
                return default[0]
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return value

    accessor.__name__, accessor.__qualname__, accessor.__module__ = name, f"{cls.__name__}.{name}", cls.__module__
    accessor.__doc__ = f"``{path}`` of the engine.".replace("``_config.", "``config.")
    return accessor


def _put(cls, name, value, place):
    assert name not in vars(cls), f"{name} is in {place} and in {cls.__name__}"
    setattr(cls, name, value)
