"""A checkpoint appears whole or not at all, and the one before it stays until then.

1. Files are written into a hidden folder beside the one they are for, each one synced to the disk.
2. When all ranks have written theirs, the manifest is written and synced. A folder with a manifest is complete.
3. The hidden folder takes the final name; where that name exists already, the two are swapped (``swap``).
4. ``latest`` is replaced, in one rename as well.

Killed at any moment, a run leaves at most hidden folders, which the next save into the same directory removes. No
reader ever sees a folder under its final name that is not complete.

[Note: in place] A file system that cannot rename folders (a mounted object store) has no such step. There files are
written into the final folder, which has an owner's mark and no manifest meanwhile; manifest and ``latest`` come last.
A tag that is saved again is not there until then. ``load_checkpoint`` refuses a folder with the mark alone.
"""

import contextlib
import errno
import os
import shutil

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.names import HIDDEN
from deepspeed.checkpoint.write import file_writer, owner, verify
from deepspeed.checkpoint.write.pointer import CANNOT_RENAME, cannot_rename
from deepspeed.formats.recorded_paths import path_below, remove_below
from deepspeed.log import logger

# ---- begin ---------------------------------------------------------------------------------------------------------


def begin(folder, in_place=None):
    """A folder for the files of ``folder``; one process calls it. Returns its path: a hidden one, or ``folder`` itself.

    ``in_place``: see the note above; None finds out whether folders can be renamed. Raises OSError; also when another
    process that is alive is saving the same.
    """
    staging, parent = hidden(folder, "saving"), os.path.dirname(folder)
    try:
        os.makedirs(parent, exist_ok=True)
        settle(folder)
        for path in (staging, hidden(folder, "making"), folder):
            if os.path.isdir(path) and owner.is_alive(path):
                raise OSError(
                    errno.EBUSY,
                    f"{owner.described(path)} is saving the same checkpoint at this moment: give each run a save_dir, "
                    "or tags, of its own",
                )
        if not in_place:
            why = _make_staging(folder, staging)
            if why is None:
                return staging
            text = f"{parent} cannot rename folders ({os.strerror(why)})"
            if in_place is not None:
                raise OSError(why, f"{text}, and checkpoint.write_in_place is false: set it to true or null")
            logger.warning(
                f"{text}: checkpoints are written in place there, as with checkpoint.write_in_place. A tag that is "
                "saved again is lost when the save is broken off"
            )
        os.makedirs(folder, exist_ok=True)
        own = owner.own_files(folder)
        owner.claim(folder, lock=False, in_place=True, files=sorted(own - {verify.NAME, owner.NAME}))
        owner.remove_own(folder, spared=(owner.NAME,))
        remove_leftovers(parent, os.stat(owner.path_in(folder)).st_mtime)
        return folder
    except OSError as error:
        raise OSError(error.errno, f"cannot make the checkpoint folder {folder}: {error.strerror}") from error


def _make_staging(folder, staging):
    """An empty folder with this process's mark, which gets its name by a rename, as the whole checkpoint will. Returns
    why the file system cannot do that, an errno, or None."""
    made = hidden(folder, "making")
    remove(made)
    os.mkdir(made)
    try:
        owner.claim(made)
        remove_leftovers(os.path.dirname(folder), os.stat(owner.path_in(made)).st_mtime, spared=made)
        remove(staging)
        file_writer.rename(made, staging)
    except OSError as error:
        remove(made)
        if error.errno not in CANNOT_RENAME:
            raise
        return error.errno
    owner.renamed(made, staging)
    return None


def remove_leftovers(save_dir, now, spared=None):
    """Removes what killed runs have left of their saves. ``now``: the time as the file system has it."""
    for name in os.listdir(save_dir):
        tag, _, what = name[1:].rpartition(".")
        path = os.path.join(save_dir, name)
        ours = name.startswith(".") and what in HIDDEN and path != spared
        if not ours or os.path.islink(path) or not os.path.isdir(path):
            continue
        if what in ("saving", "replaced"):
            settle(os.path.join(save_dir, tag))
        if os.path.isdir(path) and owner.is_abandoned(path, now):
            remove(path)


# ---- end -----------------------------------------------------------------------------------------------------------


def finish(folder, staging, facts, records):
    """The files in ``staging`` (of ``begin``) become the checkpoint ``folder``; one process calls it, when all have
    written.

    ``records``: name -> record (a dict, see ``file_record``) of every file, of all ranks that wrote into the folder.
    """
    text = verify.text_of(facts, records)
    file_writer.PreparedBytes(text.encode()).write(owner.make_way(staging, verify.NAME))
    for path in sorted({os.path.dirname(name) for name in records} | {""}):
        file_writer.sync_directory(os.path.join(staging, path))
    if staging != folder and os.path.lexists(folder):
        swap(staging, folder)
    elif staging != folder:
        if cannot_rename(staging, folder) is not None:
            os.mkdir(folder)
            _move_files(staging, folder)
        file_writer.sync_directory(os.path.dirname(folder))
    owner.disown(folder, claimed_as=staging)


def abandon(folder, staging):
    """After a failure: the hidden folder goes, the checkpoint that was there stays. In place what was written goes."""
    if staging == folder:
        if os.path.isdir(folder) and whole_manifest(folder) is None:
            owner.remove_own(folder)
    elif is_half_moved(folder):
        owner.let_go(staging)  # the next save goes on with it
    else:
        remove(staging)


# ---- before loading ------------------------------------------------------------------------------------------------


def path_to_read(folder):
    """The path from which the checkpoint ``folder`` is to be read, after ``settle``. Raises RuntimeError for one that a
    save in place has not finished."""
    real = os.path.realpath(folder)
    found = settle(real)
    if found != real:
        return found
    if owner.facts_of(real) is not None and whole_manifest(real) is None:
        who = owner.described(real)
        state = "is writing it at this moment" if owner.is_alive(real) else "was broken off while it was writing it"
        whole = names_of_whole(os.path.dirname(real))
        raise RuntimeError(
            f"the checkpoint {folder} is not complete: {who} {state}, in place (checkpoint.write_in_place). Load "
            f"another tag; complete are: {', '.join(whole) or 'none'}"
        )
    return folder


def whole_manifest(folder):
    """The content of the manifest in ``folder``; None without one, and for a damaged one: in place, it is written like
    any other file."""
    with contextlib.suppress(verify.DamagedManifest, OSError):
        return verify.read(folder)
    return None


def names_of_whole(save_dir):
    """Tags in ``save_dir`` that have a manifest."""
    found = sorted(os.listdir(save_dir)) if os.path.isdir(save_dir) else ()
    return [name for name in found if not name.startswith(".") and whole_manifest(os.path.join(save_dir, name))]


# ---- checkpoints that are too old ----------------------------------------------------------------------------------


def remove_checkpoint(folder):
    """Removes a checkpoint, and nothing else that is in its folder; killed halfway, it leaves no half checkpoint that
    looks whole."""
    others, doomed = owner.others_files(folder), hidden(folder, "removing")
    owner.claim(folder, lock=False)
    remove(doomed)
    if others or cannot_rename(folder, doomed) is not None:
        owner.remove_own(folder)
    remove(doomed)


def retire(save_dir, keep_last, current):
    """Removes the oldest checkpoints that this library wrote into ``save_dir`` until ``keep_last`` are left.

    ``current``: the tag just saved; it and the one that ``latest`` names are never removed, nor are links to folders
    elsewhere.
    """
    try:
        spared = {current, names.latest_tag(save_dir)}
    except (ValueError, OSError) as error:
        logger.warning(f"keep_last removes nothing: {error}")
        return
    found = []
    for name in os.listdir(save_dir):
        folder = os.path.join(save_dir, name)
        if name.startswith(".") or os.path.islink(folder) or not os.path.isfile(os.path.join(folder, verify.NAME)):
            continue
        facts = whole_manifest(folder) or {}
        if "saved_at" not in facts and not facts.get("universal"):
            logger.warning(f"{folder} is not removed by keep_last: its manifest is damaged; see ds_ckpt verify")
        elif not facts.get("universal"):  # a user has converted that on purpose
            found.append((facts["saved_at"], name))
    removable = [name for _, name in sorted(found) if name not in spared]
    for name in removable[: max(0, len(found) - keep_last)]:
        remove_checkpoint(os.path.join(save_dir, name))


# ---- swap ----------------------------------------------------------------------------------------------------------
# A complete hidden folder replaces a tag's folder; killed in between, either of the two is there to load. -
# ``RENAME_EXCHANGE`` swaps them in one step. - Where the file system has none (NFS, older Lustre): the old folder is
# renamed to ``.<tag>.replaced``, then the new one takes the name. Between the two the name is free; ``settle`` finds
# the new folder, and gives it its name. - Where the old folder cannot be renamed (it is of a lower layer of an
# overlay): its manifest goes, and the new files are renamed into it one by one, their manifest last. ``settle`` goes
# on where that was broken off. Loading and the next save call ``settle``.


def hidden(folder, what):
    """A hidden folder beside ``folder``: its name says whose it is and what for."""
    parent, name = os.path.split(os.path.normpath(folder))
    return os.path.join(parent, f".{name}.{what}")


def remove(folder):
    """Removes a hidden folder of ours, if it is there; what cannot be removed is only logged."""

    def tell(_, path, error):
        if not isinstance(error[1], FileNotFoundError):  # a save in the background may be removing the same
            logger.warning(f"cannot remove {path}: {error[1]}")

    owner.let_go(folder)
    if os.path.isdir(folder):
        shutil.rmtree(folder, onerror=tell)


def swap(new, folder):
    """The complete folder ``new`` becomes ``folder``. What others have put into the old one is there again."""
    parent = os.path.dirname(folder)
    owner.carry_over(folder, new)
    with contextlib.suppress(PermissionError):  # a folder without write permission is swapped all the same
        owner.claim(folder, lock=False)  # so that it can be removed, under whatever name a crash leaves it
    try:
        old = new
        if not file_writer.exchange(new, folder):
            old = hidden(folder, "replaced")
            remove(old)
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
    owner.carry_over(old, folder)  # what has come meanwhile
    remove(old)


def _move_files(new, folder):
    """Goes on where it was broken off: the old manifest is gone then, and the new one is still in ``new``."""
    if not is_half_moved(folder):
        owner.claim(folder, lock=False, moving=True, files=sorted(owner.own_files(folder)))
        if os.path.exists(os.path.join(folder, verify.NAME)):
            os.unlink(os.path.join(folder, verify.NAME))
        file_writer.sync_directory(folder)
    manifest = os.path.join(new, verify.NAME)
    facts = verify.read(new)
    if facts is None:
        raise FileNotFoundError(errno.ENOENT, f"{manifest} is gone, which says what goes to {folder}", manifest)
    listed = facts["files"]
    for path in owner.listed_in_mark(folder) - set(listed) - {verify.NAME, owner.NAME}:
        remove_below(folder, path, owner.path_in(folder))
    for path in (*sorted(listed), verify.NAME):
        if path == verify.NAME:
            file_writer.sync_directory(folder)
        if not os.path.lexists(os.path.join(new, path)):
            continue
        above = os.path.dirname(path)
        if above:
            os.makedirs(path_below(folder, above, manifest), exist_ok=True)
        file_writer.rename(path_below(new, path, manifest), os.path.join(folder, path))
    file_writer.sync_directory(folder)
    owner.carry_over(new, folder)  # others' files, which may be here alone if the folder was made anew
    owner.disown(folder)
    remove(new)


def is_half_moved(folder):
    """Whether a swap file by file was broken off, or is going on."""
    facts = owner.facts_of(folder)
    return bool(facts and facts.get("moving")) and not os.path.exists(os.path.join(folder, verify.NAME))


def settle(folder):
    """Ends a swap that a killed run has left half done. Returns the path under which the checkpoint ``folder`` is to be
    read: another one where nothing can be renamed, or its owner may still be at it."""
    new, old = hidden(folder, "saving"), hidden(folder, "replaced")
    if is_half_moved(folder):
        if not owner.is_alive(new) and os.path.exists(os.path.join(new, verify.NAME)):
            logger.info(f"{folder}: a save that was broken off while it replaced the files is completed")
            _move_files(new, folder)
        return folder
    if os.path.lexists(folder) or not os.path.isdir(old):
        return folder
    manifests = ((candidate, whole_manifest(candidate)) for candidate in (new, old))
    found = next((path for path, facts in manifests if facts and not verify.missing_or_short(path, facts)), None)
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
