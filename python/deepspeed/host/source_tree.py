"""The commit of a git checkout, read from its files: git may not be installed, or may refuse another user's folder.

Imports nothing of the package, because setup.py reads this file.
"""

import os

UNKNOWN = "[none]"


def _read(*path):
    try:
        with open(os.path.join(*path), encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


def commit(root):
    """``(hash, branch)`` of the checkout at ``root``: seven digits and a name; ``[none]`` for what is not known."""
    folder = os.path.join(root, ".git")
    if os.path.isfile(folder):  # a worktree or a submodule
        folder = os.path.join(root, _read(folder).partition("gitdir: ")[2])
    head = _read(folder, "HEAD")
    if not head:
        return UNKNOWN, UNKNOWN
    if not head.startswith("ref: "):
        return head[:7], UNKNOWN
    ref = head[len("ref: ") :]
    common = os.path.join(folder, _read(folder, "commondir") or ".")
    found = _read(folder, ref) or _read(common, ref)
    if not found:
        packed = (line.split() for line in _read(common, "packed-refs").splitlines())
        found = next((line[0] for line in packed if len(line) == 2 and line[1] == ref), "")
    return found[:7] or UNKNOWN, ref.removeprefix("refs/heads/")
