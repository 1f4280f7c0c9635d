"""Small text files that are replaced in one step: ``latest`` and ``latest_universal``.

Each replacement goes through a temporary file of its own in the same folder, so that processes that save at the same
time never mix their texts, and nobody can have put a link in its place. Those that a killed process has left are
removed by the next replacement: their names say whose they are.
"""

import errno
import hashlib
import os
import re
import secrets
import time

from deepspeed._native import _C
from deepspeed.checkpoint.write import file_writer, owner
from deepspeed.formats.recorded_paths import remove_below

# What a file system says that has no rename of folders, or not of this one. EMFILE: gcsfuse, above a number of files.
CANNOT_RENAME = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EMFILE)


def _place():
    # Where process ids mean the same.
    here = owner.Process.here()
    return hashlib.sha256(f"{here.boot} {here.pid_space}".encode()).hexdigest()[:8]


def replace_text(path, text):
    """Replaces the file ``path``, in one rename where the file system has one; else it is written anew."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{_place()}-{os.getpid()}-{secrets.token_hex(8)}.writing")
    try:
        file_writer.write_bytes(text.encode(), temporary)
        try:
            file_writer.rename(temporary, path)
        except OSError as error:
            if error.errno not in CANNOT_RENAME:
                raise
            os.unlink(temporary)
            owner.make_way(folder, name)
            file_writer.write_bytes(text.encode(), path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
    file_writer.sync_directory(folder)
    _remove_left(folder, name)


def _remove_left(folder, name):
    form = re.compile(re.escape(f".{name}.") + r"([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{16}\.writing")
    for other in os.listdir(folder or os.curdir):
        match = form.fullmatch(other)
        if match is None:
            continue
        try:
            old = time.time() - os.lstat(os.path.join(folder, other)).st_mtime > owner.LEASE_S
            if old or (match[1] == _place() and _C.process_ended(int(match[2]))):
                remove_below(folder, other, folder)
        except OSError:  # another process has removed it, or may alone
            pass
