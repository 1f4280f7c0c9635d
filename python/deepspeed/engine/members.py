"""The public members of the engine class that the parts of an engine bring.

A part is an object that an engine makes for itself. What its class marks with ``@member`` is a member of the engine,
too, which hands on to the part. Parts call each other's members through the engine, so that subclasses and clients who
replace a method of one engine are asked. Attributes in ``engine_attributes`` of its class are the engine's, too.

A part hears of what its engine does by having a method of one of these names (``HOOKS``); nothing lists who has which:

- ``start()``: the engine is assembled. ``stop()``: it is destroyed.
- ``before_micro_step(boundary)``, ``after_micro_step(boundary)``: of every ``engine.step()``, at an accumulation
  boundary or not. In the second one the counters of the engine are those after the step.
- ``add_keywords(kwargs)``: of every forward; it may put more keyword arguments of the model into the dict.
- ``see_inputs(inputs, kwargs)``: of every forward that trains, with these.
- ``forwarded(number)``: of every forward that trains, after it, with its number. ``Backward.reached`` says the numbers
  of those that a backward has reached.
- ``around(phase)``: of every ``"forward"`` of the model and every ``"backward"`` of the engine; in pipelines of every
  pass of a micro-batch. It returns a context manager in which the phase runs, or None. Contexts of later parts are
  entered inside of those of earlier ones.
- ``see_loss(loss, parts)``: of every ``engine.backward(loss)``, before the loss is divided by ``parts``.
- ``failed(error)``: a forward, a backward, a step or an instruction of a pipeline has raised ``error``, perhaps on this
  rank alone: no communication.
- ``effective_tokens(tokens)``: of every micro-batch, after its backward, where tokens are counted. It gets their
  number, which may be a tensor without dimensions, and returns the number that counts, which goes to the next part that
  has the hook. Fractions are rounded for each micro-batch.
- ``before_step()``: once for each step of the optimizer; gradients are all there and nothing has changed yet.
- ``after_step()``: once for each step of the optimizer, skipped ones included, when nothing of it is left to do; in
  pipelines after the schedule. It may save and raise SystemExit.
- ``failed_step()``: a step has raised an error.
- ``before_save()``, ``after_load()``: of ``save_checkpoint`` and of a ``load_checkpoint`` that has found something.

Every rank runs all of them but ``failed`` and ``failed_step``, in one order, so they may communicate.
"""

import contextlib
import functools
import importlib
import pkgutil

from deepspeed.utils.forwarding import forwarded, put

HOOKS = (
    "start", "add_keywords", "see_inputs", "forwarded", "around", "see_loss", "before_micro_step", "effective_tokens",
    "before_step", "after_micro_step", "after_step", "failed", "failed_step", "before_save", "after_load", "stop",
)  # fmt: skip


def member(function):
    """Marks a function of a part (below ``@property`` or ``@staticmethod``) as a member of the engine."""
    function.engine_member = True
    return function


class Part:
    """The base class of parts. State that begins with a constant is an attribute of the part's class."""

    def __init__(self, engine):
        self.engine = engine


class Parts:
    """The parts of one class of engines: those of ``base``, another class's ``Parts``, and its own."""

    def __init__(self, base=None):
        self._base, self._rows, self._cls = base, [], None

    def add(self, name, order=0):
        """Class decorator: engines made from now on hold an object of this class under ``name``. Parts are made and
        hear of hooks by ``order``, then those of the base first, then as their files are called."""

        def register(part):
            assert all(name != other for _, other, _ in self.rows()), f"two parts are called {name}"
            self._rows.append((order, name, part))
            if self._cls is not None:
                _bring_members(self._cls, name, part)
            return part

        return register

    def rows(self):
        """``(order, name, class)`` of all parts."""
        return sorted([*(self._base.rows() if self._base else ()), *self._rows], key=lambda row: row[0])

    def compose(self, package):
        """Class decorator: engines of the class have the parts that the files of ``package`` add, and later ones."""
        for file in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{file.name}")

        def compose(cls):
            cls._parts, self._cls = self, cls
            for _, name, part in self._rows:
                _bring_members(cls, name, part)
            return cls

        return compose

    def make(self, engine):
        """Makes the parts of ``engine``."""
        made = []
        for _, name, part in self.rows():
            made.append(part(engine))
            setattr(engine, name, made[-1])
        engine._hooks = {hook: [one for one in made if hasattr(one, hook)] for hook in HOOKS}


engine_parts = Parts()
pipeline_parts = Parts(engine_parts)


def run_hooks(engine, hook, *args):
    """Calls the hook of each part that has it."""
    for part in engine._hooks[hook]:
        getattr(part, hook)(*args)


def inside_hooks(engine, phase):
    """A context manager: the contexts that parts want around ``phase``, ``"forward"`` or ``"backward"``."""
    contexts = [one for one in (part.around(phase) for part in engine._hooks["around"]) if one is not None]
    if not contexts:
        return contextlib.nullcontext()
    stack = contextlib.ExitStack()
    try:
        for one in contexts:
            stack.enter_context(one)
    except BaseException:
        stack.close()
        raise
    return stack


def through_hooks(engine, hook, value):
    """Passes ``value`` through the hook of each part that has it, and returns what the last one has returned."""
    for part in engine._hooks[hook]:
        value = getattr(part, hook)(value)
    return value


def _bring_members(cls, name, part):
    for key in getattr(part, "engine_attributes", ()):
        put(cls, key, forwarded(f"{name}.{key}"), f"a part ({part.__name__})")
    for key, value in vars(part).items():
        if getattr(_function_of(value), "engine_member", False):
            put(cls, key, _handed_on(name, key, value), f"a part ({part.__name__})")


def _function_of(value):
    return value.fget if isinstance(value, property) else getattr(value, "__func__", value)


def _handed_on(part, name, value):
    if isinstance(value, staticmethod):
        return value
    if isinstance(value, property):
        return forwarded(f"{part}.{name}", value.fset is not None, value.__doc__)

    @functools.wraps(value)
    def method(self, *args, **kwargs):
        return getattr(getattr(self, part), name)(*args, **kwargs)

    return method
