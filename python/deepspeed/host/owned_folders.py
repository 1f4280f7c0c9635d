"""Files that this process runs, such as compiled modules, must not come from other users of the machine."""

import os
import stat


def why_foreign(path, top):
    """The reason why another user may have written the file ``path``, or None. It, and all folders from its own up to
    ``top``, must belong to this user or to root, and nobody else may write to them. For folders of this user that
    others may write to the permission is taken away; ``top`` itself may be writable, because what is directly in it has
    an owner, too."""
    users, top = {os.geteuid(), 0}, os.path.abspath(top)
    path = os.path.abspath(path)
    levels = [path]
    while levels[-1] != top and os.path.dirname(levels[-1]) != levels[-1]:
        levels.append(os.path.dirname(levels[-1]))
    for at in reversed(levels):
        try:
            found = os.lstat(at)
        except OSError as error:
            return f"{at}: {error.strerror}"
        if stat.S_ISLNK(found.st_mode):
            if found.st_uid not in users:
                return f"the link {at} belongs to user {found.st_uid}"
            problem = why_foreign(os.path.realpath(at), os.path.dirname(os.path.realpath(at)))
            if problem is not None:
                return problem
        elif found.st_uid not in users:
            return f"{at} belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        elif found.st_mode & 0o022 and at != top and not _closed(at, found):
            return f"{at} may be written to by other users (mode {stat.S_IMODE(found.st_mode):o})"
    return None


def _closed(path, found):
    """Takes the permission to write from others."""
    try:
        os.chmod(path, stat.S_IMODE(found.st_mode) & ~0o022)
    except OSError:
        return False
    return True
