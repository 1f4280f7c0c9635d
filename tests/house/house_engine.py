"""Rules of the training core: stage numbers, options, the width of bindings. Each check returns a list of sentences."""

import ast
import re

from house_cpp import lines_without_comments
from house_tables import MAX_BINDING_ARGUMENTS, STAGE_NUMBERS_CPP, STAGE_NUMBERS_PYTHON, WIDE_BINDINGS
from sentences import listed

SEE = "See docs/architecture.md (stages) and tests/house/house_tables.py."
ASK = (
    "Ask a field of zero::StagePolicy (engine._stage_policy in Python), or add one there: a stage is a row of one table"
)
CPP_STAGE = r"\b(?:\w+_)?stage(?:\(\)|_\b|\b)"
CPP_COMPARISON = re.compile(
    rf"{CPP_STAGE}\s*(?:[=!<>]=|<(?!<)|>(?!>))\s*\d|\b\d+\s*(?:[=!<>]=|<(?!<)|>(?!>))\s*(?:\w+(?:\.|->))*{CPP_STAGE}"
    rf"|\bswitch\s*\([^)]*{CPP_STAGE}"
)


@listed
def check_stage_numbers_cpp(files):
    for path, number, line in lines_without_comments(files, STAGE_NUMBERS_CPP):
        if CPP_COMPARISON.search(line) and not path.startswith("config/"):
            yield f"csrc/{path}:{number} compares a ZeRO stage with a number. {ASK}. {SEE}"


@listed
def check_stage_numbers_python(modules):
    for module in modules.values():
        path = module.path
        if module.room == "config" or path in STAGE_NUMBERS_PYTHON:
            continue
        for node in ast.walk(module.tree):
            sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
            if any(map(_names_a_stage, sides)) and any(map(_is_numbers, sides)):
                yield f"{path}:{node.lineno} compares a ZeRO stage with a number. {ASK}. {SEE}"
            if isinstance(node, ast.Match) and _names_a_stage(node.subject):
                yield f"{path}:{node.lineno} matches a ZeRO stage. {ASK}. {SEE}"


def _names_a_stage(node):
    while isinstance(node, ast.Call):
        node = node.args[0] if ast.unparse(node.func) == "int" and node.args else node.func
    name = node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)
    return isinstance(name, str) and (name == "stage" or name.endswith("_stage"))


def _is_numbers(node):
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return bool(node.elts) and all(map(_is_numbers, node.elts))
    return isinstance(node, ast.Constant) and type(node.value) is int


# ---- bindings --------------------------------------------------------------------------------------------------------


@listed
def check_binding_arguments(files):
    for path, text in files.items():
        for match in re.finditer(r"\.\s*def(?:_static)?\s*\(", text) if path.startswith("bindings/") else ():
            call = _balanced(text, match.end() - 1)
            count = len(re.findall(r"\bpy::arg\s*\(", call))
            (name,) = re.findall(r'^\(\s*"(\w+)"', call) or ["__init__"]
            if count > MAX_BINDING_ARGUMENTS and (path, name) not in WIDE_BINDINGS:
                where = f"csrc/{path}:{text.count(chr(10), 0, match.start()) + 1}"
                yield (
                    f"{where} binds {name} with {count} arguments, more "
                    f"than {MAX_BINDING_ARGUMENTS}. What the configuration says C++ reads from it; rows of a table go "
                    f"as one list. Or add a row to WIDE_BINDINGS that says why not. {SEE}"
                )


def _balanced(text, start):
    """From the bracket at ``start`` to the one that closes it. Brackets within literals come in pairs here."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return text[start : place + 1]
    return text[start:]


# ---- options ---------------------------------------------------------------------------------------------------------

OPTIONS_FILES = ("zero/engine_options.cpp", "zero/engine_options.h")


@listed
def check_engine_options(files):
    for path, number, line in lines_without_comments(files, OPTIONS_FILES):
        if re.search(r"\bEngineOptions\s*(?:\w+\s*)?[;{(=]", line):
            yield (
                f"csrc/{path}:{number} makes EngineOptions: engine_options.cpp alone does, from the configuration, "
                f"so that a key has one reader and one default. Pass the configuration. {SEE}"
            )


@listed
def check_option_defaults(files):
    """The Field line of a key holds its default; engine_options.cpp reads resolved values."""
    for path, number, line in lines_without_comments({OPTIONS_FILES[0]: files.get(OPTIONS_FILES[0], "")}):
        if re.search(r"\b\w+_or\b|\bfallback\b|\bis_null\(\)\s*\?|\bkey(?:<[^()]*>)?\(\s*config\s*,[^,()]*,", line):
            yield (
                f"csrc/{path}:{number} holds a default: the Field line in csrc/config/sections has it, and "
                f"key() finds it where the section is absent, too. {SEE}"
            )


# ---- checkpoints without the engine ----------------------------------------------------------------------------------


def _own_attributes(tree):
    """Names that methods of the tree's classes give to ``self``, and private methods and properties."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            found |= {node.attr} if node.value.id == "self" else set()
        if isinstance(node, ast.FunctionDef) and re.match("_[a-z]", node.name):
            found.add(node.name)
    return found


def part_names(tree):
    """Names under which classes of the tree are registered as parts of engines."""
    for node in ast.walk(tree):
        for call in node.decorator_list if isinstance(node, ast.ClassDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) in ("engine_parts.add", "pipeline_parts.add"):
                yield call.args[0].value


@listed
def check_checkpoint_without_engine(modules):
    """``checkpoint`` reads no attribute that engines have and a ``RunState`` has not, whatever the object is called.
    Methods of its own classes are called by such names, too (``saved.module()``)."""
    by_path = {module.path: module for module in modules.values()}
    engines = _own_attributes(by_path["engine/engine.py"].tree) | _own_attributes(by_path["engine/accessors.py"].tree)
    for path, module in by_path.items():
        engines.update(part_names(module.tree) if path.startswith("engine/") else ())
    run_state = ast.walk(by_path["checkpoint/run_state.py"].tree)
    engines -= {node.target.id for node in run_state if isinstance(node, ast.AnnAssign)}
    room = [module.tree for module in by_path.values() if module.room == "checkpoint"]
    methods = {node.name for tree in room for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for path, module in by_path.items():
        own = _own_attributes(module.tree)
        nodes = list(ast.walk(module.tree)) if module.room == "checkpoint" else []
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        for node in nodes:
            plain = not isinstance(node, ast.Attribute) or ast.unparse(node).startswith("torch.")
            if plain or (id(node) in called and node.attr in methods):
                continue
            owner = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", None)
            if owner == "engine" or (node.attr in engines and node.attr not in own):
                yield (
                    f"{path}:{node.lineno} reads .{node.attr} of an engine: checkpoint saves and fills a RunState "
                    "(checkpoint/run_state.py). Add a field there, which engine/parts/checkpoints.py makes. "
                    "See docs/architecture.md"
                )
