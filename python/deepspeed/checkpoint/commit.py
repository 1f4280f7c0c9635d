"""A checkpoint appears whole or not at all, and the one before it stays until then.

1. Files are written into a hidden folder beside the one they are for, each one synced to the disk.
2. When all ranks have written theirs, the manifest is written and synced. A folder with a manifest is complete.
3. The hidden folder takes the final name; where that name exists already, the two swap names in one system call.
4. ``latest`` is replaced, in one rename as well.

Killed at any moment, a run leaves at most a hidden folder, which the next save into the same directory removes. No
reader ever sees a folder under its final name that is not complete.
"""

import json
import os
import shutil
import socket

from deepspeed.checkpoint import file_writer, manifest, names
from deepspeed.log import logger

OWNER = ".owner.json"


def _hidden(folder, what):
    parent, name = os.path.split(os.path.normpath(folder))
    return os.path.join(parent, f".{name}.{what}")


def staging_of(folder):
    """Where the files of the checkpoint ``folder`` are until it is complete."""
    return _hidden(folder, "saving")


def _remove(folder):
    """Removes a folder that may be half there; what cannot be removed is only logged: the checkpoint is safe."""
    shutil.rmtree(folder, onerror=lambda _, path, error: logger.warning(f"cannot remove {path}: {error[1]}"))


def _is_abandoned(folder):
    """Whether the process that wrote into this hidden folder is known to be gone."""
    try:
        with open(os.path.join(folder, OWNER)) as file:
            owner = json.load(file)
    except (OSError, ValueError):
        return False
    if owner.get("host") != socket.gethostname():
        return False
    try:
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def remove_leftovers(save_dir):
    """Removes what killed runs of this machine have left of their saves."""
    for name in os.listdir(save_dir) if os.path.isdir(save_dir) else ():
        path = os.path.join(save_dir, name)
        hidden = name.startswith(".") and name.endswith((".saving", ".removing"))
        if hidden and os.path.isdir(path) and (name.endswith(".removing") or _is_abandoned(path)):
            _remove(path)


def remove_checkpoint(folder):
    """Removes a checkpoint; one that is killed halfway leaves no half checkpoint under its name."""
    doomed = _hidden(folder, "removing")
    if os.path.exists(doomed):
        _remove(doomed)
    file_writer.rename(folder, doomed)
    _remove(doomed)


def begin(folder):
    """An empty hidden folder for the files of ``folder``; one process calls it. Returns its path."""
    staging = staging_of(folder)
    try:
        os.makedirs(os.path.dirname(staging), exist_ok=True)
        remove_leftovers(os.path.dirname(staging))
        if os.path.isdir(staging):
            _remove(staging)
        os.mkdir(staging)
        with open(os.path.join(staging, OWNER), "w") as file:
            json.dump({"host": socket.gethostname(), "pid": os.getpid()}, file)
    except OSError as error:
        raise OSError(error.errno, f"cannot make the checkpoint folder {folder}: {error.strerror}") from error
    return staging


def _is_ours(path, saved):
    return path in saved or path in (manifest.NAME, OWNER) or names.is_checkpoint_file(os.path.basename(path))


def _carry_over(old, staging):
    """What others have put into the folder that is replaced stays: hard links, or copies where there are none."""
    try:
        facts = manifest.read(old)
    except manifest.DamagedManifest:
        facts = None
    saved = set(facts["files"]) if facts else set()
    for root, _, files in os.walk(old):
        for name in files:
            source = os.path.join(root, name)
            path = os.path.relpath(source, old)
            target = os.path.join(staging, path)
            if _is_ours(path, saved) or os.path.lexists(target):
                continue
            os.makedirs(os.path.dirname(target), exist_ok=True)
            try:
                os.link(source, target, follow_symlinks=False)
            except OSError:
                shutil.copy2(source, target, follow_symlinks=False)


def finish(folder, facts, records):
    """The files in the hidden folder become the checkpoint ``folder``; one process calls it, when all have written.

    ``records``: name -> record (a dict, see ``file_record``) of every file, of all ranks that wrote into the folder.
    """
    staging = staging_of(folder)
    text = manifest.text_of(facts, records)
    if os.path.isdir(folder):
        _carry_over(folder, staging)
    file_writer.write_bytes(text.encode(), os.path.join(staging, manifest.NAME))
    for path in sorted({os.path.dirname(name) for name in records} | {""}):
        file_writer.sync_directory(os.path.join(staging, path))
    if os.path.lexists(folder):
        file_writer.exchange(staging, folder)
        file_writer.sync_directory(os.path.dirname(folder))
        _remove(staging)
    else:
        file_writer.rename(staging, folder)
        file_writer.sync_directory(os.path.dirname(folder))
    os.unlink(os.path.join(folder, OWNER))


def abandon(folder):
    """After a failure: the hidden folder goes, the checkpoint that was there stays."""
    staging = staging_of(folder)
    if os.path.isdir(staging):
        _remove(staging)


def replace_text(path, text):
    """Replaces a small text file in one rename."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.writing")
    file_writer.write_bytes(text.encode(), temporary)
    file_writer.rename(temporary, path)
    file_writer.sync_directory(folder)


def retire(save_dir, keep_last, current):
    """Removes the oldest checkpoints that this library wrote into ``save_dir`` until ``keep_last`` are left.

    ``current``: the tag just saved; it and the one that ``latest`` names are never removed.
    """
    spared = {current, names.latest_tag(save_dir)}
    found = []
    for name in os.listdir(save_dir):
        folder = os.path.join(save_dir, name)
        if name.startswith(".") or not os.path.isfile(os.path.join(folder, manifest.NAME)):
            continue
        try:
            found.append((manifest.read(folder)["saved_at"], name))
        except (manifest.DamagedManifest, KeyError):
            logger.warning(f"{folder} is not removed by keep_last: its manifest is damaged; see ds_ckpt verify")
    surplus = len(found) - keep_last
    for _, name in sorted(found):
        if surplus > 0 and name not in spared:
            remove_checkpoint(os.path.join(save_dir, name))
            surplus -= 1
