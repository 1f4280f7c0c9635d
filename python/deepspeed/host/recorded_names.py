"""A recorded name becomes a path: the function of ``csrc/io/folders/paths.h`` for programs that run without torch.

Those are ``ds_ckpt``, the launcher, and the script ``zero_to_fp32.py`` beside a checkpoint. All other code calls
``path_below`` of ``deepspeed.formats.recorded_paths``, which is the C++ function. Tests compare the two.
"""

import errno
import os
import stat

KINDS = ("path", "entry", "tag")


def path_below(folder, name, source, kind="path"):
    """``folder/name`` for a name that ``source`` (a file, or who sent it) says.

    ``kind``: "path": parts with '/' between them, and no link in it may leave the folder; "entry": one part; "tag": as
    "path", but links are followed, since users link tags to folders on other drives. Raises ValueError that has
    ``source``, the name and the reason: an absolute name, an empty one, one with an empty part, '.', '..' or a zero
    byte, or a link that leads out of the folder or nowhere.
    """

    def refuse(why):
        shown = "'" + _shown(name) + "'" if isinstance(name, str) else ascii(name)
        raise ValueError(
            f"{source} has the name {shown}, which {why}: it is damaged, or somebody wants files outside of {folder} "
            "to be read or changed. Nothing was done with that name"
        )

    if kind not in KINDS:
        raise ValueError(f"the kind of a recorded name is path, entry or tag, not '{kind}'")
    if not isinstance(name, str):
        refuse("is not text")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        refuse("cannot be the name of a file")
    parts = name.split("/")
    for wrong, why in (
        (not name, "is empty"),
        ("\0" in name, "has a zero byte"),
        (name.startswith("/"), "is an absolute path"),
        (kind == "entry" and len(parts) > 1, "has a '/' and is to be the name of one file or folder"),
        *((part in ("", os.curdir, os.pardir), f"has a part '{part}'") for part in parts),
    ):
        if wrong:
            refuse(why)
    if kind != "tag":
        _check_links(os.fspath(folder), parts, refuse)
    return os.path.join(folder, name)


def _shown(name):
    """For messages: bytes that are no plain characters as \\xNN, so that every terminal and log file takes them."""
    try:
        data = os.fsencode(name)
    except UnicodeEncodeError:
        data = name.encode("utf-8", "backslashreplace")
    return "".join(chr(b) if 0x20 <= b < 0x7F else f"\\x{b:02x}" for b in data)


def open_regular(path):
    """The regular file ``path``, open for reading bytes. OSError also for a pipe or a device of that name, on which a
    read might wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "this is not a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_tag(folder, pointer):
    """The tag that the file ``pointer`` in ``folder`` names, which may be "". OSError, and ValueError for a text that
    is no path below the folder; a link of that name is the user's, and may lead to another drive."""
    path = os.path.join(folder, pointer)
    with open_regular(path) as file:
        tag = file.read().decode("utf-8", "surrogateescape").strip()
    if tag:
        path_below(folder, tag, path, "tag")
    return tag


def _check_links(folder, parts, refuse):
    try:
        root = os.path.realpath(folder, strict=True)
    except OSError:  # no folder, so no links in it
        return
    at = root
    for part in parts:
        at = os.path.join(at, part)
        try:
            if not stat.S_ISLNK(os.lstat(at).st_mode):
                continue
        except OSError:  # what is not there has no links in it
            return
        try:
            target = os.path.realpath(at, strict=True)
        except OSError:
            refuse(f"is or goes through a link that leads nowhere ({at})")
        if root != "/" and target != root and not target.startswith(root + "/"):
            refuse(f"is or goes through a link that leaves the folder ({at})")
        at = target
