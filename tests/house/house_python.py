"""Checks of the Python package against the tables. Each returns a list of sentences, empty when all is well."""

import ast

from house_tables import (
    FACADE_ROOM,
    GROUP_MAKERS,
    HEAD_NODE_FLOOR,
    HEAD_NODE_ROOMS,
    LATE_IMPORTS,
    MAKER_OF_GROUPS,
    PYTHON_FLOORS,
)
from sentences import listed, texts

SEE = "See docs/architecture.md (the arrows) and tests/house/house_tables.py."


class Module:
    """One file: its dotted name, and the imports in it."""

    def __init__(self, path, source):
        self.path, self.source = path, source
        parts = path[: -len(".py")].split("/")
        self.is_package = parts[-1] == "__init__"
        if self.is_package:
            parts = parts[:-1]
        self.name = ".".join(["deepspeed", *parts])
        self.room = parts[0] if parts else ""
        self.tree = ast.parse(source, filename=path)

    def imports(self):
        """(line, dotted target, names or None, at the top of the file) of every import statement."""
        top = set()
        for node in self.tree.body:
            # `try: import x` and `if TYPE_CHECKING:` at module level are the top of the file, too.
            inner = ast.walk(node) if isinstance(node, (ast.If, ast.Try)) else [node]
            top.update(id(one) for one in inner)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield node.lineno, alias.name, None, id(node) in top
            elif isinstance(node, ast.ImportFrom):
                yield node.lineno, self._absolute(node), [alias.name for alias in node.names], id(node) in top

    def _absolute(self, node):
        if node.level == 0:
            return node.module
        here = self.name.split(".")
        base = here[: len(here) - node.level + (1 if self.is_package else 0)]
        return ".".join(base + ([node.module] if node.module else []))


def load(package):
    """All modules of the package folder, by dotted name."""
    modules = [Module(path, source) for path, source in texts(package, [".py"]).items()]
    return {module.name: module for module in modules}


def targets(module, modules, top_only=False):
    """(line, name of the imported module of ours) for what `module` imports of this package."""
    for line, target, names, at_top in module.imports():
        if top_only and not at_top:
            continue
        if target != "deepspeed" and not target.startswith("deepspeed."):
            continue
        if names is None:
            yield line, target
            continue
        for name in names:
            submodule = f"{target}.{name}"
            yield line, submodule if submodule in modules else target


def room_of(name):
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def floor_of(room):
    return next((number for number, floor in enumerate(PYTHON_FLOORS) if room in floor), None)


@listed
def check_arrows(modules):
    for module in modules.values():
        if not (module.room == FACADE_ROOM or module.room in HEAD_NODE_ROOMS or floor_of(module.room) is not None):
            yield (
                f"{module.path}: the room '{module.room}' stands nowhere in the house. Put it on a floor of "
                f"PYTHON_FLOORS, above all it needs and below all that need it. {SEE}"
            )
            continue
        for line, target in targets(module, modules):
            room = room_of(target)
            if room == module.room or module.room == FACADE_ROOM:
                continue
            where = f"{module.path}:{line} imports {target}"
            if room == FACADE_ROOM:
                yield (
                    f"{where}: runtime/ holds import paths for existing scripts and nothing else; import the module "
                    f"that it re-exports from. {SEE}"
                )
            elif module.room in HEAD_NODE_ROOMS:
                if room not in HEAD_NODE_FLOOR:
                    yield (
                        f"{where}: {module.room} runs on a head node without torch, so it may use only "
                        f"{', '.join(sorted(HEAD_NODE_FLOOR))}. Move what it needs there, or ask in a process of its "
                        f"own. {SEE}"
                    )
            elif room in HEAD_NODE_ROOMS:
                yield f"{where}: {room} is a program; move what is shared down to host/ or log. {SEE}"
            elif floor_of(room) is None or floor_of(room) >= floor_of(module.room):
                yield (
                    f"{where}: no arrow leads from '{module.room or '__init__'}' to '{room or '__init__'}': imports go "
                    f"to lower floors only, or the order in which modules load becomes a secret. Move what is shared "
                    f"to a lower room, or let the caller pass it in. {SEE}"
                )


@listed
def check_groups(modules):
    """``mesh`` and what carries ``deepspeed.comm`` may be asked by others, and end there."""
    for module in modules.values():
        if module.path == MAKER_OF_GROUPS:
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in GROUP_MAKERS and _receiver(node.func) not in ("mesh", "current_backend()"):
                yield (
                    f"{module.path}:{node.lineno} calls {name}: {MAKER_OF_GROUPS} alone makes groups of ranks, once "
                    f"for each set of them, by their members. Ask mesh.group_over(ranks), or for a native "
                    f"communicator the mesh of the engine. {SEE}"
                )


def _receiver(function):
    return ast.unparse(function.value) if isinstance(function, ast.Attribute) else None


def check_cycles(modules):
    """One sentence per cycle of files that import each other at the top."""
    edges = {
        name: sorted({target for _, target in targets(module, modules, top_only=True) if target in modules} - {name})
        for name, module in modules.items()
    }
    problems, state, trail = [], {}, []

    def visit(name):
        state[name] = "open"
        trail.append(name)
        for target in edges[name]:
            if state.get(target) == "open":
                cycle = trail[trail.index(target) :] + [target]
                problems.append(
                    f"import cycle {' -> '.join(cycle)}: whichever is imported first sees the other half-made. Move "
                    f"what both need into a third file."
                )
            elif target not in state:
                visit(target)
        trail.pop()
        state[name] = "closed"

    for name in sorted(edges):
        if name not in state:
            visit(name)
    return problems


@listed
def check_imports_at_top(modules):
    for module in modules.values():
        for line, target, _, at_top in module.imports():
            if not at_top:
                yield (
                    f"{module.path}:{line} imports {target} inside a function: imports stand at the top of the file, "
                    f"where they can be seen and checked. Against a cycle move code, not the import. For an optional "
                    f"package use importlib and a row in LATE_IMPORTS that says why. {SEE}"
                )
        if module.path in LATE_IMPORTS:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
                yield (
                    f"{module.path}:{node.lineno} imports by a name in a string, which hides an arrow. Import it at "
                    f"the top of the file, or add a row to LATE_IMPORTS that says why not. {SEE}"
                )


def _called(func):
    return func.id if isinstance(func, ast.Name) else getattr(func, "attr", None)


@listed
def check_head_node(modules):
    """Nothing that the launcher and the report import at the top leads to torch."""
    for start in modules.values():
        if start.room not in HEAD_NODE_ROOMS:
            continue
        seen, queue = {start.name}, [(start, [start.name])]
        while queue:
            module, trail = queue.pop()
            for line, target, _, at_top in module.imports():
                if at_top and target.split(".")[0] == "torch":
                    yield (
                        f"{start.path} reaches torch through {' -> '.join(trail)} (line {line}): the launcher and the "
                        f"report start on machines without torch, and at once. {SEE}"
                    )
            for _, target in targets(module, modules, top_only=True):
                if target in modules and target not in seen:
                    seen.add(target)
                    queue.append((modules[target], [*trail, target]))


@listed
def check_facades(modules):
    for module in modules.values():
        if module.room != FACADE_ROOM:
            continue
        for node in module.tree.body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name != "__getattr__":
                yield (
                    f"{module.path}:{node.lineno} defines {node.name}: runtime/ only re-exports names at the import "
                    f"paths of existing scripts. Put the code into the room it belongs to. {SEE}"
                )
