"""What a tag may be: the name of a folder in the save directory, or a path to one in it."""

import errno
import os

from deepspeed.checkpoint import names

HIDDEN = ("making", "saving", "replaced", "removing", "meeting")  # what hidden folders beside a tag's end with


def check_tag(tag, save_dir):
    """Raises ValueError for a ``tag`` (a text) under which nothing can be saved in ``save_dir``, or not found again."""

    def refuse(why, fix):
        raise ValueError(f"the checkpoint tag {tag!r} {why}. {fix}")

    plain = "Pass the name of a folder to be made in save_dir, such as tag='step100', or None for global_step<N>"
    if not tag.strip():
        refuse(f"is empty: the checkpoint would be {save_dir} itself and replace the other tags there", plain)
    if "\0" in tag or "\n" in tag or tag != tag.strip():
        refuse(
            "begins or ends with blanks, or has a line break or zero byte in it: 'latest' could not name it", plain
        )
    if os.path.isabs(tag):
        refuse(f"is an absolute path: it leaves save_dir {save_dir}", "Pass that folder as save_dir, and a name as tag")
    parts = tag.rstrip("/").split("/")
    if os.pardir in parts or os.curdir in parts or "" in parts:
        refuse(
            f"has a part '.', '..' or '': it may leave save_dir {save_dir}, or name a folder that has another name too",
            f"{plain}; a folder in a folder is tag='run1/step100'",
        )
    if parts[-1] in (names.LATEST, names.LATEST_UNIVERSAL, names.SCRIPT) and len(parts) == 1:
        refuse("is the name of a file that a save writes into save_dir", plain)
    for part in parts:
        if part.startswith(".") and part.endswith(tuple(f".{what}" for what in HIDDEN)):
            refuse("is the name of a hidden folder of a save in progress", plain)


def folder_of(save_dir, tag):
    """The folder that ``tag`` is, symbolic links followed: so it can be replaced, and lies where its disk is.

    Raises ValueError for a link to the save directory itself or to a folder above it, NotADirectoryError where a file
    has that name.
    """
    folder, above = os.path.realpath(os.path.join(save_dir, tag)), os.path.realpath(save_dir)
    if os.path.commonpath([folder, above]) == folder:
        raise ValueError(
            f"the checkpoint tag {tag!r} is a link to {folder}, which holds save_dir {save_dir}: the checkpoint would "
            "replace it. Remove the link, or pass another tag"
        )
    if os.path.lexists(folder) and not os.path.isdir(folder):
        raise NotADirectoryError(
            errno.ENOTDIR, f"the checkpoint tag {tag!r} is a file, {folder}: move it away, or pass another tag", folder
        )
    return folder
