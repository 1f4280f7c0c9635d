"""Members of a class that hand on to what an object holds."""

import operator


def forwarded(path, written=True, doc=None):
    """A property: the attribute at ``path``, as in ``"optimizer.state"``, of the object, which can be set, too, if
    ``written``."""
    holder, _, name = path.rpartition(".")

    def write(self, value):
        setattr(operator.attrgetter(holder)(self) if holder else self, name, value)

    return property(operator.attrgetter(path), write if written else None, doc=doc)


def answers_from(paths, below=None):
    """Class decorator: a method for each name, which returns what lies at its path below an attribute of the object, or
    in the object itself. A path is ``"section.key"``, or ``(path, value)`` where the section may be None: the value
    stands for what is in it. What lies at ``"core.publish()"`` is called."""

    def add(cls):
        for name, path in paths.items():
            path, *default = (path,) if isinstance(path, str) else path
            put(cls, name, _accessor(cls, name, path if below is None else f"{below}.{path}", default), "the table")
        return cls

    return add


def _accessor(cls, name, path, default):
    parts, calls = path.removesuffix("()").split("."), path.endswith("()")

    def accessor(self):
        value = self
        for part in parts:
            if value is None and default:
                return default[0]
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        return value() if calls else value

    accessor.__name__, accessor.__qualname__, accessor.__module__ = name, f"{cls.__name__}.{name}", cls.__module__
    accessor.__doc__ = f"``{path.removeprefix('_')}`` of this object."
    return accessor


def put(cls, name, value, source):
    """``value`` becomes the member ``name`` of a class that has no such member of its own yet."""
    assert name not in vars(cls), f"{name} is in {source} and in {cls.__name__}"
    setattr(cls, name, value)
