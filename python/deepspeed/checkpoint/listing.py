"""The checkpoints of a directory, as ``ds_ckpt ls`` shows them."""

import dataclasses
import os
import time

from deepspeed.checkpoint import manifest, names


@dataclasses.dataclass(frozen=True)
class Entry:
    """One checkpoint. ``state``: complete, damaged, short (files missing) or unknown (no manifest)."""

    tag: str
    folder: str
    state: str
    files: int
    size: int
    facts: dict
    is_latest: bool

    def row(self):
        saved_at = self.facts.get("saved_at")
        return [
            self.tag + (" (latest)" if self.is_latest else ""),
            self.state,
            str(self.facts.get("global_steps", "?")),
            str(self.facts.get("zero_stage", "?")),
            str(self.facts.get("world_size", "?")),
            str(self.files),
            f"{self.size / 1e6:.1f} MB",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved_at)) if saved_at else "?",
        ]


HEADER = ["tag", "state", "step", "stage", "ranks", "files", "size", "saved"]


def is_checkpoint(folder):
    """Whether ``folder`` is the folder of one tag."""
    try:
        found = os.listdir(folder)
    except NotADirectoryError:
        return False
    return any(name == manifest.NAME or names.is_checkpoint_file(name) for name in found)


def _entry(folder, tag, latest):
    sizes = [os.lstat(os.path.join(root, name)).st_size for root, _, found in os.walk(folder) for name in found]
    try:
        facts = manifest.read(folder)
        short = facts and manifest.missing_or_short(folder, facts)
        state = "unknown" if facts is None else "short" if short else "complete"
    except manifest.DamagedManifest:
        facts, state = None, "damaged"
    return Entry(tag, folder, state, len(sizes), sum(sizes), facts or {}, tag == latest)


def checkpoints_of(directory):
    """Entries of a directory that ``save_checkpoint`` wrote into, or of the one checkpoint that ``directory`` is,
    oldest first. Raises FileNotFoundError where there is none."""
    if not os.path.isdir(directory):
        raise FileNotFoundError(f"there is no directory {directory}")
    if is_checkpoint(directory):
        parent, tag = os.path.split(os.path.abspath(directory))
        return [_entry(directory, tag, names.latest_tag(parent))]
    latest = names.latest_tag(directory)
    tags = []
    for root, folders, _ in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if root != directory and is_checkpoint(root):
            tags.append(os.path.relpath(root, directory))
            folders.clear()
    found = [_entry(os.path.join(directory, tag), tag, latest) for tag in tags]
    if not found:
        raise FileNotFoundError(f"{directory} holds no checkpoint")
    return sorted(found, key=lambda entry: (entry.facts.get("saved_at", 0), entry.tag))
