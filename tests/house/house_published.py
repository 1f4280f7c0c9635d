"""Rules of ``published/``: constructors that scripts call are translated there, and nobody else depends on that."""

import ast

from house_python import targets
from house_tables import FACADE_ROOM, PUBLISHED_IMPORTERS, PUBLISHED_NAMES, PUBLISHED_ROOM
from sentences import listed

SEE = "See docs/architecture.md (the rooms) and tests/house/house_tables.py."


@listed
def check_unread_arguments(modules):
    """Named arguments of constructors of public classes that the constructor does not read."""
    for path, owner, methods in _classes(module for module in modules.values() if module.room != PUBLISHED_ROOM):
        for name in _unread(methods.get("__init__")) if not owner.startswith("_") else ():
            yield (
                f"{path}:{methods['__init__'].lineno} {owner} takes '{name}' and does not read it: its caller "
                f"believes that it does something. Take it away, or read it; where scripts pass it, a class "
                f"in {PUBLISHED_ROOM}/ takes what they pass and hands on what is read. {SEE}"
            )


def _classes(modules):
    """(path, name, {name of a method: it}) of each class."""
    for module in modules:
        for one in ast.walk(module.tree):
            if isinstance(one, ast.ClassDef):
                yield module.path, one.name, {item.name: item for item in one.body if isinstance(item, ast.FunctionDef)}


def _unread(function):
    """Names of arguments of a constructor, if there is one, that it does not read."""
    if function is None:
        return []
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    read = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return [one.arg for one in given[1:] if one.arg not in read]


@listed
def check_users_of_published(modules):
    """Only the engine and the facades import ``published/``; strings that name it count, too."""
    prefix = f"deepspeed.{PUBLISHED_ROOM}"
    for module in modules.values():
        if module.room in PUBLISHED_IMPORTERS | {PUBLISHED_ROOM, FACADE_ROOM}:
            continue
        found = [*targets(module, modules)]
        if module.path not in PUBLISHED_NAMES:
            found += [
                (node.lineno, node.value)
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
        for line, target in found:
            if target == prefix or target.startswith((f"{prefix}.", f"{prefix}:")):
                yield (
                    f"{module.path}:{line} uses {target}: a class there only translates its arguments for a class of a "
                    f"room below; use that one. {SEE}"
                )


@listed
def check_published_holds_nothing(modules):
    """A class in ``published/`` with arguments that it does not read has nothing but its constructor and what only
    changes the order of arguments: the work is done by a class of a room below."""
    for path, owner, methods in _classes(module for module in modules.values() if module.room == PUBLISHED_ROOM):
        for name, item in methods.items() if _unread(methods.get("__init__")) else ():
            if name != "__init__" and not _only_hands_on(item):
                yield (
                    f"{path}:{item.lineno} {owner}.{name} does work: {PUBLISHED_ROOM}/ translates arguments. "
                    f"Move the method to the base class, in the room that it belongs to. {SEE}"
                )


def _only_hands_on(function):
    """Whether the body, apart from a docstring, is one call of ``super()``."""
    body = [item for item in function.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    value = getattr(body[0], "value", None) if len(body) == 1 else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == f"super().{function.name}"
