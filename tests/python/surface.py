"""Compares what is importable with the published interface: names, signatures, defaults, methods, constants.

``data/api_surface.json`` lists, module by module, what scripts, integrations and other people's test suites import from
DeepSpeed 0.19.6: ``{module: {name: {kind, signature, methods, properties, members, value}}}``. Signatures come without
``self`` and without annotations; a default is an expression.
"""

import ast
import enum
import importlib
import inspect
import json
import logging
import os
import pathlib
import sys
import typing

import torch

_PATH = os.path.join(os.path.dirname(os.path.abspath(__file__)), "data", "api_surface.json")
_KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: "",
    inspect.Parameter.POSITIONAL_OR_KEYWORD: "",
    inspect.Parameter.KEYWORD_ONLY: "",
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
UNKNOWN = object()


def load():
    return json.loads(pathlib.Path(_PATH).read_text(encoding="utf-8"))


def evaluate(expression, module):
    """The value of a published default or constant in the module's own names; UNKNOWN where it has none there."""
    names = {"torch": torch, "sys": sys, "logging": logging, "nn": torch.nn, "typing": typing, **vars(typing)}
    names.update(vars(importlib.import_module("deepspeed.constants")))
    names.update(vars(module))
    if "get_caller_func" in expression:
        return UNKNOWN  # the name of whoever imports
    try:
        return eval(compile(expression, "<published>", "eval"), names)  # noqa: S307 (our own data file)
    except Exception:
        return UNKNOWN


def published_parameters(signature, module):
    """[(name with its stars, default or inspect.Parameter.empty)] of ``(a, b=1, *args, **kw)``."""
    signature = (
        signature.split(" ", 1)[1] if signature.split(" ", 1)[0] in ("staticmethod", "classmethod") else signature
    )
    arguments = ast.parse(f"def f{signature}: pass").body[0].args
    empty = inspect.Parameter.empty
    positional = arguments.posonlyargs + arguments.args
    defaults = [empty] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    found = [(arg.arg, default) for arg, default in zip(positional, defaults, strict=True)]
    if arguments.vararg:
        found.append(("*" + arguments.vararg.arg, empty))
    for arg, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append((arg.arg, empty if default is None else default))
    if arguments.kwarg:
        found.append(("**" + arguments.kwarg.arg, empty))
    return [(name, d if d is empty else evaluate(ast.unparse(d), module)) for name, d in found]


def real_parameters(function, skip_first, own=()):
    """The same of what is there, without the parameters in ``own``, which must have defaults."""
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
    for p in parameters:
        assert p.name not in own or p.default is not p.empty, f"{p.name} is ours and needs a default"
    return [(_KINDS[p.kind] + p.name, p.default) for p in parameters if p.name not in own]


def _same(published, real):
    if published is UNKNOWN or real is inspect.Parameter.empty:
        return published is UNKNOWN and real is not inspect.Parameter.empty
    if isinstance(published, enum.Enum) or isinstance(real, enum.Enum):
        return getattr(published, "value", published) == getattr(real, "value", real)
    try:
        return bool(published == real) or repr(published) == repr(real)
    except Exception:
        return repr(published) == repr(real)


def compare_parameters(published, real):
    """A text that says what differs, or None."""
    empty = inspect.Parameter.empty
    if [name for name, _ in published] != [name for name, _ in real]:
        return f"takes {[name for name, _ in real]}, published is {[name for name, _ in published]}"
    for (name, wanted), (_, default) in zip(published, real, strict=True):
        if wanted is empty and default is empty:
            continue
        if wanted is empty or not _same(wanted, default):
            return f"default of {name!r} is {default!r}, published is {wanted!r}"
    return None


def compare_class(entry, cls, module, own):
    """The differences in the constructor, the methods and the properties of a class."""
    problems = []
    if not issubclass(cls, (enum.Enum, BaseException)) and entry["signature"] != "()":
        difference = compare_parameters(
            published_parameters(entry["signature"], module), real_parameters(cls, False, own.get(cls.__name__, ()))
        )
        if difference:
            problems.append(("", difference))
    for name, signature in entry.get("methods", {}).items():
        raw = inspect.getattr_static(cls, name, None)
        if raw is None:
            problems.append((name, "is missing"))
            continue
        has_self = not isinstance(raw, (staticmethod, classmethod))
        try:
            real = real_parameters(getattr(cls, name), has_self, own.get(f"{cls.__name__}.{name}", ()))
        except (TypeError, ValueError) as error:
            problems.append((name, f"has no signature: {error}"))
            continue
        difference = compare_parameters(published_parameters(signature, module), real)
        if difference:
            problems.append((name, difference))
    for name in entry.get("properties", []):
        if inspect.getattr_static(cls, name, None) is None and name not in getattr(cls, "__annotations__", {}):
            problems.append((name, "property is missing"))
    return problems


def compare(entry, value, module, own):
    """[(member or "", what differs)] of one published name."""
    kind = entry["kind"]
    if kind == "class":
        if not inspect.isclass(value):
            return [("", f"is {type(value).__name__}, published is a class")]
        return compare_class(entry, value, module, own)
    if kind == "function":
        real = real_parameters(value, False, own.get(value.__name__, ()))
        difference = compare_parameters(published_parameters(entry["signature"], module), real)
        return [("", difference)] if difference else []
    calls = any(isinstance(node, ast.Call) for node in ast.walk(ast.parse(entry.get("value", ""))))
    if "value" in entry and not calls:  # making another logger, say, would change the one there is
        wanted = evaluate(entry["value"], module)
        if wanted is not UNKNOWN and not _same(wanted, value):
            return [("", f"is {value!r}, published is {wanted!r}")]
    return []


def resolve(module_name):
    """The module of that name: an import path, or an attribute of the package above (``deepspeed.checkpointing``)."""
    try:
        return importlib.import_module(module_name)
    except ImportError:
        parent, _, name = module_name.rpartition(".")
        if not parent:
            raise
        found = getattr(resolve(parent), name, None)
        if not inspect.ismodule(found):
            raise
        return found


def problems_of(module_name, names, own):
    """{"module", "module:name" or "module:name.member": what differs}. ``own``: parameters that only ours have."""
    try:
        module = resolve(module_name)
    except ImportError as error:
        return {module_name: f"cannot be imported: {error}"}
    found = {}
    for name, entry in names.items():
        if not hasattr(module, name):
            found[f"{module_name}:{name}"] = "is missing"
            continue
        for member, text in compare(entry, getattr(module, name), module, own):
            found[f"{module_name}:{name}.{member}" if member else f"{module_name}:{name}"] = text
    return found
