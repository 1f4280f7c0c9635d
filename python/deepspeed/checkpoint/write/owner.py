"""The owner of a folder: a small file in it says which process writes there. Is that process known to be gone?

Host name and process id are not enough: two containers may have both in common. The kernel's boot id, the namespace of
process ids and the time at which the process started tell processes of one machine apart; a lock on the file, which
the kernel drops with the process, tells more where the file system has locks. Of processes elsewhere only the lock
can say that they are alive, and nothing that they are gone but time: see ``LEASE_S``.
"""

import collections
import contextlib
import fcntl
import json
import os
import pathlib
import shutil
import socket

from deepspeed._native import _C
from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import verify
from deepspeed.formats.recorded_paths import path_below, remove_below
from deepspeed.host.recorded_names import open_regular
from deepspeed.host.texts import read_text
from deepspeed.log import logger

# ---- owner ---------------------------------------------------------------------------------------------------------

NAME = ".owner.json"
LEASE_S = 24 * 3600.0  # in which a process of which nothing else is known writes something, or has given up

_held = {}  # folder -> descriptor of a file that this process has locked


class Process(collections.namedtuple("Process", "host boot pid_space pid started")):
    """Facts about a process: where it runs and which one there it is. Empty texts and 0: not known."""

    @classmethod
    def here(cls):
        boot = read_text("/proc/sys/kernel/random/boot_id")
        return cls(socket.gethostname(), boot, _pid_space(), os.getpid(), _C.process_began(os.getpid()))

    def is_gone(self, here):
        """True or False where the process ``here`` can tell, else None."""
        if not self.boot or not self.pid_space or (self.boot, self.pid_space) != (here.boot, here.pid_space):
            return None
        return _C.process_ended(self.pid) or (self.started != 0 and _C.process_began(self.pid) != self.started)


def _pid_space():
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def path_in(folder):
    return os.path.join(folder, NAME)


def claim(folder, lock=True, **more):
    """Writes into ``folder`` that it is this process's; ``more``: other facts. Raises OSError."""
    disown(folder)  # a mounted object store writes no file twice
    facts = {**Process.here()._asdict(), **more, "locked": False}
    _held[folder] = os.open(path_in(folder), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with contextlib.suppress(OSError):  # no locks here
            if lock:
                fcntl.flock(_held[folder], fcntl.LOCK_EX | fcntl.LOCK_NB)
                facts["locked"] = True
        os.write(_held[folder], json.dumps(facts).encode())
    finally:
        if not facts["locked"]:
            let_go(folder)


def let_go(folder):
    """Gives up the lock; before the file goes: NFS keeps a removed file that is open under another name."""
    descriptor = _held.pop(folder, None)
    if descriptor is not None:
        os.close(descriptor)


def disown(folder, claimed_as=None):
    """Nobody writes into ``folder`` any more; it may have had another name, ``claimed_as``, when that began."""
    let_go(claimed_as or folder)
    pathlib.Path(path_in(folder)).unlink(missing_ok=True)


def renamed(folder, name):
    """The claimed ``folder`` is called ``name`` now."""
    if folder in _held:
        _held[name] = _held.pop(folder)


def facts_of(folder):
    """The facts that the folder's owner has written, a dict; None where nobody has."""
    try:
        with open_regular(path_in(folder)) as file:
            facts = json.loads(file.read())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def is_gone(folder, here=None):
    """Whether the owner of ``folder`` is gone: True, False, or None where nobody can tell."""
    facts = facts_of(folder)
    if not facts or folder in _held:
        return False if facts else None
    process, here = _process_of(facts), here or Process.here()
    free = _is_free(path_in(folder)) if process is not None and facts.get("locked") else None
    if free is False or (free and process.boot and process.boot == here.boot):
        return free
    return process.is_gone(here) if process is not None else None


def _process_of(facts):
    """None for the mark of an earlier version, which wrote less, and for a damaged one."""
    found = Process(*map(facts.get, Process._fields))
    return found if [*map(type, found)] == [str, str, str, int, int] and 0 < found.pid < 1 << 31 else None


def is_own(folder):
    """Whether this process has claimed it."""
    return folder in _held or _process_of(facts_of(folder) or {}) == Process.here()


def is_alive(folder):
    """Whether another process is known to be at work in ``folder``."""
    return not is_own(folder) and is_gone(folder) is False


def _is_free(path):
    """Whether nobody has locked the file; None where that cannot be found out."""
    with contextlib.suppress(OSError), open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
    return None


def is_abandoned(folder, now, here=None):
    """Whether nobody will write into ``folder`` any more. ``now``: the time as its file system has it."""
    if facts_of(folder) is None:
        return False
    gone = is_gone(folder, here)
    return gone if gone is not None else now - _last_written(folder) > LEASE_S


def _last_written(folder):
    newest = 0.0
    for path in ("", *_below(folder)):
        with contextlib.suppress(OSError):
            newest = max(newest, os.lstat(os.path.join(folder, path)).st_mtime)
    return newest


def _below(folder):
    """Paths, relative to ``folder``, of all folders and files in it."""
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            yield os.path.normpath(os.path.join(os.path.relpath(root, folder), name))


def described(folder):
    """The owner's process and machine, for messages."""
    facts = facts_of(folder) or {}
    return f"process {facts.get('pid', '?')} on {facts.get('host', 'an unknown machine')}"


def _in_a_forked_child():
    """The lock is the parent's: a copy of the descriptor would keep it when the parent is gone."""
    for folder in list(_held):
        let_go(folder)


os.register_at_fork(after_in_child=_in_a_forked_child)


# ---- replaced files ------------------------------------------------------------------------------------------------
# Which files of a tag's folder a save may remove. All others stay, whatever they are called. The folder may be somebody
# else's: a manifest and an owner's mark say what they like, so a name counts only where it is a path in the folder, has
# a form that saves give to files, or is that of a file which still is what the manifest says.


def own_files(folder):
    """Paths below ``folder`` that saves of this library, or of the one whose layout it has, have put there.

    Those are files that the manifest lists. A folder without a manifest that can be trusted has the published names at
    its top, those of a universal checkpoint, and what the owner of an unfinished save in place has listed.
    """
    try:
        facts = verify.read(folder)
    except verify.DamagedManifest as error:
        logger.warning(f"{error}. A save into {folder} replaces files with the names of a checkpoint, and no others")
        facts = None
    found = {verify.NAME, NAME}
    if facts is not None:
        return found | {name for name, record in facts["files"].items() if _is_as_listed(folder, name, record)}
    is_own = names.is_published_file if facts_of(folder) is None else names.is_checkpoint_file
    return found | listed_in_mark(folder) | set(filter(is_own, os.listdir(folder))) | _universal_files(folder)


def _is_as_listed(folder, name, record):
    """Whether the file is one of a save: by its name, or else by its size and checksum."""
    if names.is_checkpoint_file(name):
        return True
    try:
        path = path_below(folder, name, os.path.join(folder, verify.NAME))
        known = os.path.getsize(path) == record["bytes"]
        return known and (names.is_universal_file(name) or verify.crc32_of(path) == record["crc32"])
    except (OSError, ValueError):
        return False


def listed_in_mark(folder):
    """The files that an unfinished save in place, or a swap file by file, says it had found there: a set."""
    files = (facts_of(folder) or {}).get("files", ())
    found = {name for name in files if isinstance(name, str)} if isinstance(files, (list, tuple)) else set()
    known = names.is_checkpoint_file, names.is_universal_file, {verify.NAME, NAME}.__contains__
    strange = sorted(name for name in found if not any(is_known(name) for is_known in known))
    if strange:
        logger.warning(
            f"{path_in(folder)} lists {strange[:3]} as files of a checkpoint, which no save writes: they stay"
        )
    return found - set(strange)


def _universal_files(folder):
    """Those of a universal checkpoint, of parameters that have a master."""
    zero = os.path.join(folder, names.ZERO_FOLDER)
    if not os.path.isfile(os.path.join(zero, names.OPTIMIZER_STATE)):
        return set()
    folders = [entry for entry in os.scandir(zero) if entry.is_dir(follow_symlinks=False)]
    folders = [entry for entry in folders if os.path.isfile(os.path.join(entry.path, "fp32.pt"))]
    files = (f"{names.ZERO_FOLDER}/{entry.name}/{name}" for entry in folders for name in os.listdir(entry.path))
    return {f"{names.ZERO_FOLDER}/{names.OPTIMIZER_STATE}", *filter(names.is_universal_file, files)}


def _folders_of(paths):
    return {str(parent) for path in paths for parent in pathlib.PurePath(path).parents} - {os.curdir}


def others_files(folder):
    """Whether there is anything in ``folder`` that is not ``own_files``; empty folders count."""
    own = own_files(folder)
    return not own.union(_folders_of(own)).issuperset(_below(folder))


def carry_over(old, new):
    """Everything in ``old`` that is not ``own_files`` is in ``new`` afterwards, too, unless something there has its
    name: hard links, or copies where there are none. Raises OSError."""
    own = own_files(old)
    made, copied = _folders_of(own), []
    for path in _below(old):
        source, target = os.path.join(old, path), os.path.join(new, path)
        is_folder = os.path.isdir(source) and not os.path.islink(source)
        if path in (made if is_folder else own) or os.path.lexists(target):
            continue
        path_below(new, path, f"the folder {old}" if is_folder else f"the folder of {source}")
        os.makedirs(target if is_folder else os.path.dirname(target), exist_ok=True)
        if is_folder:
            copied.append((source, target))
            continue
        try:
            os.link(source, target, follow_symlinks=False)
        except OSError:
            shutil.copy2(source, target, follow_symlinks=False)
    for source, target in reversed(copied):  # now: nothing can be put into one that nobody may write to
        shutil.copystat(source, target)


def remove_own(folder, spared=()):
    """Removes ``own_files`` but for ``spared``, and the folder when nothing is left. The manifest goes first: what is
    half removed must not look whole. The owner's mark goes last."""
    found = own_files(folder) - set(spared)
    for path in sorted(found - {NAME}, key=lambda path: (path != verify.NAME, path)):
        remove_below(folder, path, folder)
    for path in sorted(_folders_of(found), reverse=True):
        _remove_if_empty(folder, path)
    if NAME in found:
        disown(folder)
        _remove_if_empty(folder, "")


def _remove_if_empty(folder, path):
    with contextlib.suppress(OSError, ValueError):  # somebody else's files are in it; it is behind a link
        os.rmdir(path_below(folder, path, folder) if path else folder)


def make_way(folder, path):
    """The path of the file ``path`` in ``folder``, before it is written. A link of that name goes: the file that it
    leads to must not be written to."""
    path = os.path.join(folder, path)
    if os.path.islink(path):
        os.unlink(path)
    return path
