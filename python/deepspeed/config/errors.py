"""The exception of a wrong configuration: always a DeepSpeedConfigError, and more where users expect more.

DeepSpeed's users catch different classes for different mistakes: AssertionError for batch sizes, NotImplementedError
for a sparse attention that does not exist, ElasticityConfigError, and pydantic's ValidationError for anything in a
section. One configuration may be wrong in several of these ways at once, so the class is put together from them.
"""

import functools
import sys

from deepspeed._native import _C, DeepSpeedConfigError

DeepSpeedConfigAssertionError = _C.config.DeepSpeedConfigAssertionError
PLAIN = (DeepSpeedConfigError, DeepSpeedConfigAssertionError)


class ElasticityError(Exception):
    """Whatever is wrong with elastic training."""


class ElasticityConfigError(ElasticityError):
    """The section ``elasticity`` is wrong, or does not agree with another one."""


class ElasticityIncompatibleWorldSize(ElasticityError):
    """The number of ranks is none that the section ``elasticity`` allows."""


def config_error(text, keys=(), kinds=(), value=None):
    """The exception to raise. ``keys``: dotted paths of the keys at fault; ``kinds``: further classes that it is of.

    Where pydantic is imported it is a ``pydantic.ValidationError``, too, whose ``errors()`` tell ``text`` for each of
    ``keys`` with the input ``value``. Who has not imported pydantic cannot catch its errors, so it is not needed.
    """
    made = _class_of(frozenset(kinds), _validation_error())
    return made(text) if made in PLAIN else made(text, tuple(keys), value)


def _validation_error():
    return getattr(sys.modules.get("pydantic"), "ValidationError", None)


@functools.lru_cache(maxsize=None)
def _class_of(kinds, validation_error):
    plain = DeepSpeedConfigAssertionError if AssertionError in kinds else DeepSpeedConfigError
    if validation_error is None and kinds <= {AssertionError}:
        return plain
    bases = [plain, *sorted(kinds - {AssertionError}, key=lambda kind: kind.__name__)]
    if validation_error is not None:
        mixed = _mix([*bases, validation_error], kinds, validation_error)
        if _can_be_made(mixed):
            return mixed
    return _class_of(kinds, None) if validation_error is not None else _mix(bases, kinds, None)


def _can_be_made(cls):
    """False for the pydantic 2.x whose ValidationError is final or has no constructor."""
    try:
        return cls is not None and str(cls("", (), None)) == ""
    except Exception:  # whatever another version of pydantic makes of our arguments
        return False


def _mix(bases, kinds, validation_error):
    """A class of all ``bases`` that is made from (text, keys, value); None when the bases do not go together."""
    is_first_pydantic = hasattr(validation_error, "raw_errors")

    def new(cls, text, keys, value):
        if validation_error is None or is_first_pydantic:
            return ValueError.__new__(cls, text)
        custom = sys.modules["pydantic_core"].PydanticCustomError("deepspeed_config", "{reason}", {"reason": text})
        places = [tuple(key.split(".")) for key in keys] or [()]
        return validation_error.__new__(
            cls, "DeepSpeedConfig", [{"type": custom, "loc": loc, "input": value} for loc in places]
        )

    def init(self, text, keys, value):
        if is_first_pydantic:
            pydantic = sys.modules["pydantic"]
            places = [tuple(key.split(".")) for key in keys] or [("__root__",)]
            wrapped = [pydantic.error_wrappers.ErrorWrapper(ValueError(text), loc=loc) for loc in places]
            validation_error.__init__(self, wrapped, pydantic.create_model("DeepSpeedConfig"))
        self.args = (text,)
        self.keys, self.value = keys, value

    body = {
        "__module__": "deepspeed",
        "__doc__": DeepSpeedConfigError.__doc__,
        "__new__": new,
        "__init__": init,
        "__str__": lambda self: str(self.args[0]),
        "__repr__": lambda self: f"{type(self).__name__}({self.args[0]!r})",
        "__reduce__": lambda self: (config_error, (str(self), self.keys, tuple(kinds), self.value)),
    }
    try:
        return type(bases[0].__name__, tuple(bases), body)
    except TypeError:  # a final class
        return None


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
