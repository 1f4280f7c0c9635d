"""What comes from elsewhere: it is not unpickled, and sizes are multiplied with a check."""

import ast
import re

from house_lists import SIZES_OF_TENSORS, UNPICKLING
from sentences import listed

_PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "joblib"}
_READ = {"load", "loads", "Unpickler", "_Unpickler"}
_ROOMS_OF_SIZES = ("storage", "io", "formats", "bindings", "plan")


@listed
def check_unpickling(modules):
    """A pickle runs what its writer wants: whoever reaches a socket or the job's store can write one."""
    for module in modules.values():
        for line, name in unpicklers(module.tree):
            if (module.path, name) not in UNPICKLING:
                yield (
                    f"{module.path}:{line} calls {name}, which runs what its bytes say: use json for what comes over a "
                    f"socket or a store, and deepspeed.formats for files. A reader of files that the user trusts "
                    f"stands in UNPICKLING of tests/house/house_lists.py, with the reason."
                )


def unpicklers(tree):
    aliases = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases.update({one.asname or one.name: one.name for one in node.names})
        elif isinstance(node, ast.ImportFrom) and node.module in _PICKLES | {"torch"}:
            for one in node.names:
                if _is_reader(node.module, one.name):
                    yield node.lineno, f"{node.module}.{one.name}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            origin = aliases.get(node.value.id, "")
            if _is_reader(origin, node.attr):
                yield node.lineno, f"{origin}.{node.attr}"


def _is_reader(module, name):
    return (module in _PICKLES and name in _READ) or (module == "torch" and name == "load")


_UNCHECKED = re.compile(
    r"\* *(static_cast<\w+>\()?(c10::elementSize\(|\w+(\.|->)element_size\(\))|element_?[sS]ize\(\w*\)\)? \* "
)


@listed
def check_sizes(files):
    """``files``: ``{path below csrc: text}``."""
    for path, text in files.items():
        if path != "base/sizes.h" and "__builtin_mul_overflow" in text:
            yield f"csrc/{path} multiplies with a check of its own: use sizes::multiply of base/sizes.h."
        if path.split("/")[0] not in _ROOMS_OF_SIZES:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            known = any(path == of and line.strip().startswith(begins) for of, begins in SIZES_OF_TENSORS)
            if _UNCHECKED.search(line) and not known:
                yield (
                    f"csrc/{path}:{number} multiplies bytes of elements without a check: use sizes::product of "
                    f"base/sizes.h, which refuses what an integer cannot hold."
                )
