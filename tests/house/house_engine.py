"""Rules of the training core: who knows stage numbers. Each check returns sentences; none when all is well."""

import ast
import os
import re

from house_cpp import without_comments
from house_tables import STAGE_NUMBERS_CPP, STAGE_NUMBERS_PYTHON

SEE = "See docs/architecture.md (stages) and tests/house/house_tables.py."
ASK = (
    "Ask a field of zero::StagePolicy (engine._stage_policy in Python), or add one there: a stage is a row of one table"
)
CPP_STAGE = r"\b(?:\w+_)?stage(?:\(\)|_\b|\b)"
CPP_COMPARISON = re.compile(
    rf"{CPP_STAGE}\s*(?:[=!<>]=|<(?!<)|>(?!>))\s*\d|\b\d+\s*(?:[=!<>]=|<(?!<)|>(?!>))\s*(?:\w+(?:\.|->))*{CPP_STAGE}"
    rf"|\bswitch\s*\([^)]*{CPP_STAGE}"
)


def check_stage_numbers_cpp(files):
    problems = []
    for path, text in files.items():
        if path.startswith("config/") or path in STAGE_NUMBERS_CPP:
            continue
        for number, line in enumerate(without_comments(text).splitlines(), 1):
            if CPP_COMPARISON.search(line):
                problems.append(f"csrc/{path}:{number} compares a ZeRO stage with a number. {ASK}. {SEE}")
    return problems


def check_stage_numbers_python(modules):
    problems = []
    for module in modules.values():
        path = module.path.replace(os.sep, "/")
        if module.room == "config" or path in STAGE_NUMBERS_PYTHON:
            continue
        for node in ast.walk(module.tree):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(map(_names_a_stage, sides)) and any(map(_is_numbers, sides)):
                problems.append(f"{path}:{node.lineno} compares a ZeRO stage with a number. {ASK}. {SEE}")
            if isinstance(node, ast.Match) and _names_a_stage(node.subject):
                problems.append(f"{path}:{node.lineno} matches a ZeRO stage. {ASK}. {SEE}")
    return problems


def _names_a_stage(node):
    while isinstance(node, ast.Call):
        if isinstance(node.func, ast.Name) and node.func.id == "int" and node.args:
            node = node.args[0]
        else:
            node = node.func
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
    return isinstance(name, str) and (name == "stage" or name.endswith("_stage"))


def _is_numbers(node):
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return bool(node.elts) and all(map(_is_numbers, node.elts))
    return isinstance(node, ast.Constant) and type(node.value) is int
