"""A complete hidden folder takes the place of a tag's folder; killed in between, either of the two is there to load.

- ``RENAME_EXCHANGE`` swaps them in one step.
- Where the file system has none (NFS, older Lustre): the old folder is renamed to ``.<tag>.replaced``, then the new one
  takes the name. Between the two the name is free; ``settle`` finds the new folder, and gives it its name.
- Where the old folder cannot be renamed (it is of a lower layer of an overlay): its manifest goes, and the new files
  are renamed into it one by one, their manifest last. ``settle`` goes on where that was broken off.

Loading and the next save call ``settle``.
"""

import contextlib
import errno
import os
import shutil

from deepspeed.checkpoint import file_writer, manifest, owner, replaced_files
from deepspeed.log import logger

# What a file system says that has no rename of folders, or not of this one. EMFILE: gcsfuse, above a number of files.
CANNOT_RENAME = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EMFILE)


def hidden(folder, what):
    """A hidden folder beside ``folder``: its name says whose it is and what for."""
    parent, name = os.path.split(os.path.normpath(folder))
    return os.path.join(parent, f".{name}.{what}")


def remove(folder):
    """Removes a hidden folder of ours that may be half there; what cannot be removed is only logged."""

    def tell(_, path, error):
        if not isinstance(error[1], FileNotFoundError):  # a save in the background may be removing the same
            logger.warning(f"cannot remove {path}: {error[1]}")

    owner.let_go(folder)
    shutil.rmtree(folder, onerror=tell)


def remove_if_there(folder):
    if os.path.isdir(folder):
        remove(folder)


def swap(new, folder):
    """The complete folder ``new`` becomes ``folder``. What others have put into the old one is there again."""
    parent = os.path.dirname(folder)
    replaced_files.carry_over(folder, new)
    with contextlib.suppress(PermissionError):  # a folder that nobody may write to is swapped all the same
        owner.claim(folder, lock=False)  # so that it can be removed, under whatever name a crash leaves it
    try:
        old = new
        if not file_writer.exchange(new, folder):
            old = hidden(folder, "replaced")
            remove_if_there(old)
            file_writer.rename(folder, old)
            file_writer.rename(new, folder)
    except OSError as error:
        if not os.path.isdir(folder):
            file_writer.rename(old, folder)
        if error.errno not in CANNOT_RENAME or not os.path.isdir(new):
            owner.disown(folder)
            raise
        logger.info(f"{folder} cannot be renamed ({os.strerror(error.errno)}): its files are replaced one by one")
        _move_files(new, folder)
        return
    file_writer.sync_directory(parent)
    replaced_files.carry_over(old, folder)  # what has come meanwhile
    remove(old)


def take_name(new, folder):
    """The complete folder ``new`` becomes ``folder``, which is not there yet."""
    try:
        file_writer.rename(new, folder)
    except OSError as error:
        if error.errno not in CANNOT_RENAME:
            raise
        os.mkdir(folder)
        _move_files(new, folder)
    file_writer.sync_directory(os.path.dirname(folder))


def _move_files(new, folder):
    """Goes on where it was broken off: the old manifest is gone then, and the new one is still in ``new``."""
    if not is_half_moved(folder):
        owner.claim(folder, lock=False, moving=True, files=sorted(replaced_files.own_files(folder)))
        if os.path.exists(os.path.join(folder, manifest.NAME)):
            os.unlink(os.path.join(folder, manifest.NAME))
        file_writer.sync_directory(folder)
    listed = manifest.read(new)["files"]
    for path in set((owner.facts_of(folder) or {}).get("files", ())) - set(listed) - {manifest.NAME, owner.NAME}:
        if os.path.lexists(os.path.join(folder, path)):
            os.unlink(os.path.join(folder, path))
    for path in (*sorted(listed), manifest.NAME):
        if path == manifest.NAME:
            file_writer.sync_directory(folder)
        if os.path.lexists(os.path.join(new, path)):
            os.makedirs(os.path.dirname(os.path.join(folder, path)), exist_ok=True)
            file_writer.rename(os.path.join(new, path), os.path.join(folder, path))
    file_writer.sync_directory(folder)
    replaced_files.carry_over(new, folder)  # others' files, which may be here alone if the folder was made anew
    owner.disown(folder)
    remove(new)


def _is_complete(folder):
    try:
        facts = manifest.read(folder)
    except (manifest.DamagedManifest, OSError):
        return False
    return facts is not None and not manifest.missing_or_short(folder, facts)


def is_half_moved(folder):
    """Whether a swap file by file was broken off, or is going on."""
    facts = owner.facts_of(folder)
    return bool(facts and facts.get("moving")) and not os.path.exists(os.path.join(folder, manifest.NAME))


def settle(folder):
    """Ends a swap that a killed run has left half done. Returns the path under which the checkpoint ``folder`` is to be
    read: another one where nothing can be renamed, or its owner may still be at it."""
    new, old = hidden(folder, "saving"), hidden(folder, "replaced")
    if is_half_moved(folder):
        if not owner.is_alive(new) and os.path.exists(os.path.join(new, manifest.NAME)):
            logger.info(f"{folder}: a save that was broken off while it replaced the files is completed")
            _move_files(new, folder)
        return folder
    if os.path.lexists(folder) or not os.path.isdir(old):
        return folder
    found = next((candidate for candidate in (new, old) if _is_complete(candidate)), None)
    if found is None:
        return folder
    if owner.is_alive(found):  # about to take its name
        return folder if os.path.isdir(folder) else found
    try:
        file_writer.rename(found, folder)
    except OSError as error:
        logger.info(f"{folder} is read from {found}, where a broken-off save has left it: {error.strerror}")
        return folder if os.path.isdir(folder) else found
    logger.info(f"{folder} has its name again, which a save that was broken off had taken from it")
    owner.disown(folder, claimed_as=found)
    return folder
