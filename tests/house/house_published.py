"""Rules of ``published/``: constructors that scripts call are translated there, and nobody else depends on that."""

import ast
import os

from house_python import targets
from house_tables import FACADE_ROOM, PUBLISHED_IMPORTERS, PUBLISHED_NAMES, PUBLISHED_ROOM

SEE = "See docs/architecture.md (the rooms) and tests/house/house_tables.py."


def check_unread_arguments(modules):
    """Named arguments of constructors of public classes that the constructor does not read."""
    problems = []
    for module in modules.values():
        if module.room == PUBLISHED_ROOM:
            continue
        for one in ast.walk(module.tree):
            if not isinstance(one, ast.ClassDef) or one.name.startswith("_"):
                continue
            for function in one.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    problems += [
                        f"{module.path}:{function.lineno} {one.name} takes '{name}' and does not read it: its caller "
                        f"believes that it does something. Take it away, or read it; where scripts pass it, a class "
                        f"in {PUBLISHED_ROOM}/ takes what they pass and hands on what is read. {SEE}"
                        for name in _unread(function)
                    ]
    return problems


def _unread(function):
    given = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    read = {
        node.id
        for statement in function.body
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
    }
    return [one.arg for one in given[1:] if one.arg not in read]


def check_users_of_published(modules):
    """Only the engine and the facades import ``published/``; strings that name it count, too."""
    problems, prefix = [], f"deepspeed.{PUBLISHED_ROOM}"
    for module in modules.values():
        if module.room in PUBLISHED_IMPORTERS | {PUBLISHED_ROOM, FACADE_ROOM}:
            continue
        found = [(line, target) for line, target in targets(module, modules)]
        if module.path.replace(os.sep, "/") not in PUBLISHED_NAMES:
            found += [
                (node.lineno, node.value)
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
        problems += [
            f"{module.path}:{line} uses {target}: a class there only translates its arguments for a class of a room "
            f"below; use that one. {SEE}"
            for line, target in found
            if target == prefix or target.startswith((f"{prefix}.", f"{prefix}:"))
        ]
    return problems


def check_published_holds_nothing(modules):
    """A class in ``published/`` with arguments that it does not read has nothing but its constructor and what only
    changes the order of arguments: the work is done by a class of a room below."""
    problems = []
    for module in modules.values():
        for one in ast.walk(module.tree) if module.room == PUBLISHED_ROOM else ():
            if not isinstance(one, ast.ClassDef):
                continue
            methods = {item.name: item for item in one.body if isinstance(item, ast.FunctionDef)}
            if "__init__" in methods and _unread(methods["__init__"]):
                problems += [
                    f"{module.path}:{item.lineno} {one.name}.{name} does work: {PUBLISHED_ROOM}/ translates arguments. "
                    f"Move the method to the base class, in the room that it belongs to. {SEE}"
                    for name, item in methods.items()
                    if name != "__init__" and not _only_hands_on(item)
                ]
    return problems


def _only_hands_on(function):
    """Whether the body, apart from a docstring, is one call of ``super()``."""
    body = [item for item in function.body if not (isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant))]
    value = getattr(body[0], "value", None) if len(body) == 1 else None
    return isinstance(value, ast.Call) and ast.unparse(value.func) == f"super().{function.name}"
