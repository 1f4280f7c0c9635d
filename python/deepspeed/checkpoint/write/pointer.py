"""Small text files that are replaced in one step: ``latest`` and ``latest_universal``.

Each replacement goes through a temporary file of its own in the same folder, so that processes that save at the same
time never mix their texts, and nobody can have put a link there. Those that a killed process has left are
removed by the next replacement: their names say whose they are.
"""

import contextlib
import errno
import os
import re
import secrets
import time

from deepspeed._native import _C
from deepspeed.checkpoint.write import file_writer, owner
from deepspeed.formats.recorded_paths import remove_below

# Errors of file systems that cannot rename folders, or not this one. EMFILE: gcsfuse, above a number of files.
CANNOT_RENAME = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL, errno.EPERM, errno.EMFILE)


def cannot_rename(source, target):
    """Gives a file or folder another name, in one step. Returns the error of a file system that cannot do that, else
    None. Raises OSError."""
    try:
        file_writer.rename(source, target)
    except OSError as error:
        if error.errno not in CANNOT_RENAME:
            raise
        return error
    return None


def _host():
    """Eight digits that are the same where process ids mean the same."""
    return f"{_C.host_id():016x}"[-8:]


def replace_text(path, text):
    """Replaces the file ``path``, in one rename where the file system has one; else it is written anew."""
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name}.{_host()}-{os.getpid()}-{secrets.token_hex(8)}.writing")
    try:
        file_writer.PreparedBytes(text.encode()).write(temporary)
        if cannot_rename(temporary, path) is not None:
            os.unlink(temporary)
            file_writer.PreparedBytes(text.encode()).write(owner.make_way(folder, name))
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    file_writer.sync_directory(folder)
    _remove_left(folder, name)


def _remove_left(folder, name):
    form = re.compile(re.escape(f".{name}.") + r"([0-9a-f]{8})-(\d{1,9})-[0-9a-f]{16}\.writing")
    for match in filter(None, map(form.fullmatch, os.listdir(folder or os.curdir))):
        with contextlib.suppress(OSError):  # another process has removed it, or may alone
            old = time.time() - os.lstat(os.path.join(folder, match[0])).st_mtime > owner.LEASE_S
            if old or (match[1] == _host() and _C.process_ended(int(match[2]))):
                remove_below(folder, match[0], folder)
