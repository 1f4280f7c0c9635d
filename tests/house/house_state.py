"""Rules about state and size: Python globals, wide classes, allocations beside the storage room, long files."""

import ast
import re

from house_cpp import lines_without_comments, statements
from house_lists import ALLOCATIONS, LONG_FILES, PYTHON_STATE, WIDE_CLASSES
from sentences import listed, texts

SEE = "See docs/architecture.md (the arrows) and tests/house/house_lists.py."
MAX_METHODS = 25
MAX_LINES = {"csrc": 450, "python": 450, "benchmarks": 450, "cmake": 450, "examples": 450, "tools": 450, "tests": 600}

# ---- Python globals --------------------------------------------------------------------------------------------------

CONTAINERS = {
    "set", "dict", "list", "bytearray", "deque", "defaultdict", "OrderedDict", "Counter", "count", "local",
    "ContextVar", "WeakSet", "WeakKeyDictionary", "WeakValueDictionary",
}  # fmt: skip
CHANGES = {
    "append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "remove", "discard", "clear", "set",
}  # fmt: skip
CONSTANTS = {"Struct", "Op", "FileName"}  # classes whose objects never change
LOCKS = {"Lock", "RLock", "Condition"}  # what they guard is listed


@listed
def check_python_state(modules):
    """Names of modules that hold something a call can change."""
    for module in modules.values():
        path = module.path
        for name, line in sorted(_state_of(module.tree, modules).items()):
            if (path, name) not in PYTHON_STATE:
                yield (
                    f"{path}:{line} has '{name}', state that outlives a call and is shared by all engines of the "
                    f"process. Keep it in an object that somebody owns, or add a row to PYTHON_STATE that says why "
                    f"there can be only one. {SEE}"
                )


def _state_of(tree, modules):
    """{name: line} of names bound at the top of a module whose values change later; of names of other modules that
    a function of this one rebinds ("settings.current")."""
    top, found, locks = {}, {}, set()
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    top[target.id] = node.lineno
                    if _holds_state(node.value):
                        found[target.id] = node.lineno
                    if _class_of(node.value) in LOCKS:
                        locks.add(target.id)
    imported = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0
        for alias in node.names
        if f"{node.module}.{alias.name}" in modules
    }
    for function in ast.walk(tree):
        if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
        for name in shared:
            found.setdefault(name, top.get(name, function.lineno))
        local = _locals(function) - shared
        for node in ast.walk(function):
            for name, place in _changed(node):
                if name in top and name not in local:
                    found.setdefault(name, top[name])
                elif name in imported and isinstance(place, ast.Attribute) and name not in local:
                    found.setdefault(f"{name}.{place.attr}", place.lineno)
    return {name: line for name, line in found.items() if name not in locks}


def _class_of(value):
    function = getattr(value, "func", None)
    return getattr(function, "attr", getattr(function, "id", ""))


def _holds_state(value):
    if not isinstance(value, ast.Call):
        return isinstance(value, (ast.List, ast.Dict)) and not getattr(value, "elts", getattr(value, "keys", None))
    name = _class_of(value)
    if name in CONTAINERS:
        return not value.args or name[0].isupper()
    return name.lstrip("_")[:1].isupper() and not name.isupper() and name not in CONSTANTS | LOCKS


def _locals(function):
    """Names that a function binds itself."""
    arguments = function.args
    names = {one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    names |= {one.arg for one in (arguments.vararg, arguments.kwarg) if one}
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def _changed(node):
    """(name, what is changed in it) of a statement or a call."""
    targets = []
    if isinstance(node, (ast.Assign, ast.Delete)):
        targets = node.targets
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
        if isinstance(node.func.value, ast.Name):
            yield node.func.value.id, node
    for target in targets:
        if isinstance(target, (ast.Subscript, ast.Attribute)) and isinstance(target.value, ast.Name):
            yield target.value.id, target


# ---- classes ---------------------------------------------------------------------------------------------------------


@listed
def check_python_classes(modules):
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                methods = {one.name for one in node.body if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}
                yield from _count_methods(f"{module.path}:{node.lineno}", module.path, node.name, len(methods))


@listed
def check_cpp_classes(files):
    for path, text in files.items():
        owners, methods = {}, {}
        for line, scope, statement in statements(text):
            if statement.endswith(" {") and not statement.startswith("enum"):
                named = re.search(r"\b(?:class|struct)\s+(?:\w+\s+)*?(\w+)(?:\s+final)?\s*(?::[^:].*)?\{$", statement)
                owners[len(scope)] = (named.group(1), line) if named else None
            if scope and scope[-1] == "type" and owners.get(len(scope) - 1):
                methods.setdefault(owners[len(scope) - 1], set()).add(_method(statement))
        for (name, line), found in methods.items():
            yield from _count_methods(f"csrc/{path}:{line}", path, name, len(found - {None, name, "~" + name}))


def _method(statement):
    """The name of the function that a statement of a class declares, or None."""
    if re.match(
        r"^(using|typedef|friend|static_assert|enum|struct|class|template\s*<[^>]*>\s*(struct|class))\b", statement
    ):
        return None
    flat = statement
    while re.search(r"<[^<>()]*(\([^()]*\))?[^<>()]*>", flat):
        flat = re.sub(r"<[^<>()]*(\([^()]*\))?[^<>()]*>", "", flat)
    flat = flat if "operator" in flat else flat.split("=")[0]
    match = re.search(r"(operator\s*[^\s(]+|operator\(\)|~?\w+)\s*\(", flat)
    return match.group(1) if match else None


def _count_methods(where, path, name, count):
    if count > MAX_METHODS and (path, name) not in WIDE_CLASSES:
        yield (
            f"{where} class {name} has {count} methods, more than {MAX_METHODS}: it holds a second noun. Give that a "
            f"class of its own, or add a row to WIDE_CLASSES that says whose interface it is. {SEE}"
        )


# ---- allocations -----------------------------------------------------------------------------------------------------

ALLOCATES = re.compile(r"\b(?:at|torch)::(?:empty|zeros|ones|full)\w*\(|\.new_(?:empty|zeros)\(")
HOLDS_NOTHING = re.compile(r"\(\{0\}|kMeta")


@listed
def check_allocations(files):
    """How often a file of the core makes tensors itself instead of taking a plane or scratch."""
    found = {}
    for path, number, line in lines_without_comments(files):
        if path.startswith(("zero/", "comm/")) and not HOLDS_NOTHING.search(line):
            found.setdefault(path, []).extend([number] * len(ALLOCATES.findall(line)))
    for path, lines in found.items():
        allowed, _ = ALLOCATIONS.get(path, (0, ""))
        if len(lines) > allowed:
            yield (
                f"csrc/{path} makes tensors at {len(lines)} places (lines {', '.join(map(str, lines))}), and "
                f"{allowed} have a reason. Buffers of a run are planes and scratch of storage::ShardStorage, which "
                f"counts them, bounds them and moves them. Or say in ALLOCATIONS why not. {SEE}"
            )


# ---- files -----------------------------------------------------------------------------------------------------------


@listed
def check_length(root, suffixes=(".py", ".h", ".cpp", ".cu", ".cuh", ".cmake", ".sh")):
    for path, text in texts(root, suffixes, MAX_LINES, ("__pycache__", "_lib", "out", "cache", "results")).items():
        lines, most = len(text.splitlines()), MAX_LINES[path.split("/")[0]]
        if lines > most and path not in LONG_FILES:
            yield (
                f"{path} has {lines} lines, more than {most}: a file holds one noun. Find the second one in "
                f"it and give it a file of its own."
            )
