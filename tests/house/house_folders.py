"""Arrows between the folders of a room. Each check returns a list of sentences, empty when all is well."""

import re

from house_python import room_of, targets
from house_tables import CPP_FOLDERS, PYTHON_FOLDERS
from sentences import listed

SEE = "See docs/architecture.md (the arrows) and tests/house/house_tables.py."


def folder_of(path):
    """``a/b/c.h`` lies in the folder ``b`` of the room ``a``; "" where a file lies at the top of a room."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else ""


def _problem(where, floors, room, own, other):
    """The sentence about a file of folder ``own`` that uses folder ``other``, or None."""
    if own == other or not own or not other:
        return None
    floor = {name: number for number, names in enumerate(floors) for name in names}
    missing = [name for name in (own, other) if name not in floor]
    if missing:
        return f"{where}: the folder {room}/{missing[0]} is on no floor of its room. Put it on one. {SEE}"
    if floor[other] < floor[own]:
        return None
    return (
        f"{where}: no arrow leads from {room}/{own} to {room}/{other}: a folder uses folders of lower floors only. "
        f"Move what both need to a lower folder, or let the caller pass it in. {SEE}"
    )


@listed
def check_cpp_folders(files):
    for path, text in files.items():
        room = path.split("/")[0]
        for number, line in enumerate(text.splitlines(), 1):
            match = re.match(r'\s*#\s*include\s*"([^"]+)"', line)
            if match and match[1].split("/")[0] == room:
                where = f"csrc/{path}:{number} includes {match[1]}"
                found = _problem(where, CPP_FOLDERS.get(room, []), room, folder_of(path), folder_of(match[1]))
                if found:
                    yield found


@listed
def check_python_folders(modules):
    for module in modules.values():
        for line, target in targets(module, modules):
            if room_of(target) != module.room or target not in modules:
                continue
            own, other = folder_of(module.path), folder_of(modules[target].path)
            where = f"{module.path}:{line} imports {target}"
            found = _problem(where, PYTHON_FOLDERS.get(module.room, []), module.room, own, other)
            if found:
                yield found
