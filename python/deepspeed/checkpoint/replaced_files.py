"""Which files of a tag's folder a save may remove. All others stay, whatever they are called."""

import os
import shutil

from deepspeed.checkpoint import manifest, names, owner


def own_files(folder):
    """Paths below ``folder`` that saves of this library, or of the one whose layout it has, have put there.

    Those are the files that the manifest lists. A folder without a manifest that can be trusted has the published names
    at its top, and what the owner of an unfinished save in place has listed.
    """
    try:
        facts = manifest.read(folder)
    except manifest.DamagedManifest:
        facts = None
    found = {manifest.NAME, owner.NAME}
    if facts is not None:
        return found.union(facts["files"])
    unfinished = owner.facts_of(folder)
    found.update((unfinished or {}).get("files", ()))
    is_own = names.is_published_file if unfinished is None else names.is_checkpoint_file
    return found.union(name for name in os.listdir(folder) if is_own(name))


def _folders_of(paths):
    found = set()
    for path in paths:
        while path := os.path.dirname(path):
            found.add(path)
    return found


def others_files(folder):
    """Whether there is anything in ``folder`` that is not ``own_files``; empty folders count."""
    own = own_files(folder)
    made = _folders_of(own)
    for root, folders, files in os.walk(folder):
        where = os.path.relpath(root, folder)
        for name in (*folders, *files):
            path = os.path.normpath(os.path.join(where, name))
            if path not in own and path not in made:
                return True
    return False


def carry_over(old, new):
    """Everything in ``old`` that is not ``own_files`` is in ``new`` afterwards, too, unless something there has its
    name: hard links, or copies where there are none. Raises OSError."""
    own = own_files(old)
    made, copied = _folders_of(own), []
    for root, folders, files in os.walk(old):
        where = os.path.relpath(root, old)
        for name in folders:
            path = os.path.normpath(os.path.join(where, name))
            source, target = os.path.join(old, path), os.path.join(new, path)
            if os.path.islink(source):
                files = [*files, name]
            elif path not in made and not os.path.lexists(target):
                os.makedirs(target)
                copied.append((source, target))
        for name in files:
            path = os.path.normpath(os.path.join(where, name))
            if path not in own:
                _carry(os.path.join(old, path), os.path.join(new, path))
    for source, target in reversed(copied):  # now: nothing can be put into one that nobody may write to
        shutil.copystat(source, target)


def _carry(source, target):
    if os.path.lexists(target):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def remove_own(folder, spared=()):
    """Removes ``own_files`` but for ``spared``, and the folder when nothing is left. The manifest goes first: what is
    half removed must not look whole. The owner's mark goes last."""
    found = own_files(folder) - set(spared)
    for path in sorted(found - {owner.NAME}, key=lambda path: (path != manifest.NAME, path)):
        _remove_file(os.path.join(folder, path))
    for path in sorted(_folders_of(found), reverse=True):
        _remove_if_empty(os.path.join(folder, path))
    if owner.NAME in found:
        owner.disown(folder)
        _remove_if_empty(folder)


def _remove_file(path):
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass


def _remove_if_empty(folder):
    try:
        os.rmdir(folder)
    except OSError:  # somebody else's files are in it
        pass
