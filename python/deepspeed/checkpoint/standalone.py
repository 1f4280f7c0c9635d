"""The script zero_to_fp32.py that a checkpoint folder gets: one file, made of the modules that it needs.

It must run where DeepSpeed is not installed, so it cannot import them; and it must do what they do, so they are joined.
"""

import ast
import functools
import os
import stat

from deepspeed import utils
from deepspeed.checkpoint.names import SCRIPT
from deepspeed.log import logger
from deepspeed.utils.weight_files import write_whole

# Each uses the ones before it.
MODULES = (
    "byte_ranges",
    "lazy_tensor",
    "standalone_reader",
    "torch_archive_writer",
    "weight_files",
    "zero_to_fp32",
)


def _cut(source, nodes):
    """``source`` without the lines of some of its top-level statements."""
    lines = source.splitlines()
    for node in nodes:
        lines[node.lineno - 1 : node.end_lineno] = [None] * (node.end_lineno - node.lineno + 1)
    return "\n".join(line for line in lines if line is not None).strip("\n")


def _names(tree):
    """What a module binds at its top level, imports aside."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from _names_of(node)


def _names_of(assignment):
    return [name.id for t in assignment.targets for name in ast.walk(t) if isinstance(name, ast.Name)]


def bundle(sources):
    """One module out of ``{name: source}``, in their order: imports first, each once; those of each other fall away.

    ValueError when two of them bind the same name at the top level.
    """
    imports, bodies, owner, docstring = set(), [], {}, None
    for name, source in sources.items():
        tree = ast.parse(source)
        docstring = ast.get_docstring(tree, clean=False)
        dropped = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
        for node in dropped:
            if not (isinstance(node, ast.ImportFrom) and node.module.startswith("deepspeed")):
                imports.add(ast.unparse(node))
        dropped += tree.body[:1]
        dropped += [
            node
            for node in tree.body
            if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__"
        ]
        for bound in _names(tree):
            if bound != "__all__" and owner.setdefault(bound, name) != name:
                raise ValueError(f"{owner[bound]} and {name} both have a {bound} at the top level")
        bodies.append(f"# ==== {name} ====\n{_cut(source, dropped).removeprefix('#!/usr/bin/env python').lstrip()}")
    head = f'#!/usr/bin/env python\n"""{docstring}"""\n\n' + "\n".join(sorted(imports, key=lambda i: ("torch" in i, i)))
    return "\n\n\n".join([head, *bodies]) + "\n"


@functools.lru_cache(maxsize=1)
def script():
    """The text of the script."""
    folder = os.path.dirname(utils.__file__)
    sources = {}
    for name in MODULES:
        with open(os.path.join(folder, f"{name}.py"), encoding="utf-8") as file:
            sources[name] = file.read()
    return bundle(sources)


def _write_text(path, text):
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


def write_script(folder):
    """Puts the script into ``folder``, executable, and returns its path. That it cannot be made executable is only
    logged: not every file system knows the bit."""
    path = os.path.join(folder, SCRIPT)
    write_whole(path, _write_text, script())
    try:
        os.chmod(path, os.stat(path).st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
    except OSError as error:
        logger.warning(f"{path} cannot be made executable ({error.strerror}); run it as: python {path}")
    return path
