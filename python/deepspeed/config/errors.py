"""The exception of a wrong configuration: always a DeepSpeedConfigError, and more where users expect more.

DeepSpeed's users catch different classes for different mistakes: AssertionError for batch sizes, NotImplementedError
for a sparse attention that does not exist, ElasticityConfigError, and pydantic's ValidationError for anything in a
section. One configuration may be wrong in several of these ways at once, so the class is put together from them.
"""

import functools
import sys

from deepspeed._native import _C, DeepSpeedConfigError

DeepSpeedConfigAssertionError = _C.config.DeepSpeedConfigAssertionError


class ElasticityError(Exception):
    """Whatever is wrong with elastic training."""


class ElasticityConfigError(ElasticityError):
    """The section ``elasticity`` is wrong, or does not agree with another one."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of ranks is none that the section ``elasticity`` allows."""


def config_error(text, keys=(), kinds=(), value=None):
    """The exception to raise. ``keys``: dotted paths of the keys at fault; ``kinds``: further classes that it is of.

    Where pydantic is imported it is a ``pydantic.ValidationError``, too, whose ``errors()`` tell ``text`` for each of
    ``keys`` with the input ``value``. Who has not imported pydantic cannot catch its errors, so it is not needed. Early
    releases of pydantic 2 have a final ValidationError, which nothing can be, too.
    """
    kinds = frozenset(kinds)
    validation_error = getattr(sys.modules.get("pydantic"), "ValidationError", None)
    if validation_error is not None and _can_be_made(kinds, validation_error):
        return _make(kinds, validation_error, text, keys, value)
    return _class_of(kinds, None)(text)


@functools.lru_cache(maxsize=None)
def _can_be_made(kinds, validation_error):
    try:
        return str(_make(kinds, validation_error, "text", ["a.b"], None)) == "text"
    except Exception:  # whatever another release of pydantic makes of our arguments
        return False


def _make(kinds, validation_error, text, keys, value):
    cls = _class_of(kinds, validation_error)
    paths = [tuple(key.split(".")) for key in keys] or [("__root__",)]
    if hasattr(validation_error, "from_exception_data"):  # pydantic 2
        kind = sys.modules["pydantic_core"].PydanticCustomError("deepspeed_config", "{reason}", {"reason": text})
        lines = [{"type": kind, "loc": path, "input": value} for path in paths]
        made = cls.from_exception_data("DeepSpeedConfig", lines)
    else:
        pydantic = sys.modules["pydantic"]
        made = cls(text)
        lines = [pydantic.error_wrappers.ErrorWrapper(ValueError(text), loc=path) for path in paths]
        validation_error.__init__(made, lines, pydantic.create_model("DeepSpeedConfig"))
    made.args = (text,)
    made.keys = tuple(keys)
    return made


@functools.lru_cache(maxsize=None)
def _class_of(kinds, validation_error):
    """The class that is a DeepSpeedConfigError, of all ``kinds``, and of ``validation_error`` unless that is None."""
    plain = DeepSpeedConfigAssertionError if AssertionError in kinds else DeepSpeedConfigError
    others = sorted(kinds - {AssertionError}, key=lambda kind: kind.__name__)
    if validation_error is not None:
        others.append(validation_error)
    if not others:
        return plain
    body = {
        "__module__": "deepspeed",
        "__doc__": plain.__doc__,
        "__init__": lambda self, *ignored: None,
        "__str__": lambda self: str(self.args[0]),
        "__repr__": lambda self: f"{plain.__name__}({self.args[0]!r})",
        # Without the input: it may hold process groups and callables, which do not travel.
        "__reduce__": lambda self: (config_error, (str(self), getattr(self, "keys", ()), tuple(kinds))),
    }
    return type(plain.__name__, (plain, *others), body)


KINDS = {"assertion": AssertionError, "not_implemented": NotImplementedError}
CODES = {"world_size_not_elastic": ElasticityIncompatibleWorldSize, "not_built": None}


def raise_if_broken(native, built_only=True):
    """Raises what is wrong with a resolved configuration as one exception.

    ``built_only`` false: features that do not exist yet are no errors.
    """
    text = native.complaint(built_only)
    if not text:
        return
    kinds, keys = set(), []
    for issue in native.issues():
        if issue["severity"] != "error" or not built_only and issue["code"] == "not_built":
            continue
        keys += issue["paths"][:1]
        is_elastic = any(path.split(".")[0] == "elasticity" for path in issue["paths"])
        kinds.add(KINDS.get(issue["kind"]))
        kinds.add(CODES.get(issue["code"], ElasticityConfigError if is_elastic else None))
    raise config_error(text, keys, kinds - {None}, native.raw())
