"""Names that become paths: ``path_below`` is the way in for what a file or a socket says. Each check returns a list of
sentences, empty when all is well.

Where a name comes from cannot be read off an expression, so every join of a folder with something that is no constant,
no name that a listing of the folder has given, and no name that ``layouts/names.py`` makes, stands in the list with the
reason why no file and no socket says it.
"""

import ast

from house_name_lists import JOINED_NAMES, JOINED_NAMES_CPP
from sentences import listed

SEE = (
    "If a file, a pickle or a socket says the name, call path_below (deepspeed.formats.recorded_paths; without torch "
    "deepspeed.host.recorded_names; csrc/io/folders/paths.h). Else add it to JOINED_NAMES of "
    "tests/house/house_name_lists.py with the reason why none does."
)
_MAKERS = ("names.", "os.path.basename(")  # of names with a fixed form
_LISTINGS = ("os.listdir(", "os.scandir(", "os.walk(", "glob.glob(", ".found_in(")


def _is_fixed(node):
    if isinstance(node, ast.Constant):
        return True
    text = ast.unparse(node)
    if isinstance(node, (ast.Name, ast.Attribute)):
        return text.split(".")[-1].lstrip("_").isupper() or text in ("os.pardir", "os.curdir")
    return isinstance(node, ast.Call) and text.startswith(_MAKERS)


def _listed(function):
    """Names that loops of ``function`` over listings of folders bind."""
    loops = []
    for node in ast.walk(function):
        loops += [node] if isinstance(node, (ast.For, ast.AsyncFor)) else getattr(node, "generators", [])
    found = _bound(loop for loop in loops if any(listing in ast.unparse(loop.iter) for listing in _LISTINGS))
    # `for root, _, files in os.walk(x): for name in files`
    return found | _bound(loop for loop in loops if isinstance(loop.iter, ast.Name) and loop.iter.id in found)


def _bound(loops):
    return {name.id for loop in loops for name in ast.walk(loop.target) if isinstance(name, ast.Name)}


def joined(module):
    """``(line, expression)`` of what the file joins to folders and is not fixed."""
    functions = [node for node in ast.walk(module.tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("os.path.join", "path.join"):
            continue
        around = [f for f in functions if f.lineno <= node.lineno <= f.end_lineno]
        listed = _listed(max(around, key=lambda f: f.lineno)) if around else set()
        for argument in node.args[1:]:
            if not _is_fixed(argument) and not (isinstance(argument, ast.Name) and argument.id in listed):
                yield node.lineno, ast.unparse(argument)


def _printed(text):
    """``text``, an argument of a call, as this Python prints it: 3.11 and 3.12 quote strings in f-strings unlike."""
    return ast.unparse(ast.parse(f"join({text})", mode="eval").body.args[0])


@listed
def check_joined(modules, allowed=JOINED_NAMES):
    known = {(path, _printed(text)): text for path, texts in allowed.items() for text in texts}
    found = {(module.path, text): line for module in modules.values() for line, text in joined(module)}
    for path, text in sorted(found.keys() - known.keys()):
        yield f"{path}:{found[path, text]} joins {text} to a folder. {SEE}"
    for path, text in sorted(known.keys() - found.keys()):
        yield f"JOINED_NAMES: {path} no longer joins {known[path, text]}: take it out of the list."


@listed
def check_joined_cpp(files, allowed=JOINED_NAMES_CPP):
    found = {path for path, text in files.items() if '"/" +' in text or '+ "/"' in text}
    for path in sorted(found - set(allowed)):
        yield f"csrc/{path} makes a path of a folder and a name by itself. {SEE}"
    for path in sorted(set(allowed) - found):
        yield f"JOINED_NAMES_CPP: csrc/{path} no longer makes paths: take it out of the list."
