"""Snapshots in the memory of hosts, as they are read: see ``deepspeed.checkpoint.save.memory``."""

import contextlib
import json
import os

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.layouts.memory_names import SAID_BY, parsed, ranks_in
from deepspeed.checkpoint.write import verify
from deepspeed.formats.recorded_paths import path_below


def _said_in(folder):
    """{rank: what it says of its files} of the ranks whose files are all in the folder of a snapshot."""
    found = {}
    for rank in ranks_in(folder):
        with open(SAID_BY.path(folder, rank=rank)) as file:
            found[rank] = json.load(file)
    return found


def newest_whole(ranks, folder):
    """The name of the newest whole snapshot in the memory of all hosts, or None. Every rank calls it."""
    here, there = {}, {}
    if ranks.leads and os.path.isdir(folder):
        here = {name: ranks_in(os.path.join(folder, name)) for name in os.listdir(folder) if parsed(name)}
    for told in ranks.gather(here):
        for name, members in told.items():
            there.setdefault(name, set()).update(members)
    whole = [name for name, members in there.items() if len(members) == parsed(name)[2]]
    return max(whole, key=lambda name: (parsed(name)[1], parsed(name)[0]), default=None)


def step_on_disk(load_dir):
    """``(tag, step)`` of what ``latest`` names. Step -1 where nobody says it, tag None where there is none."""
    tag = facts = None
    with contextlib.suppress(ValueError, OSError, verify.DamagedManifest):
        tag = names.latest_tag(load_dir) or None
        facts = verify.read(os.path.join(load_dir, tag)) if tag else None
    return tag, (facts or {}).get("global_steps", -1)


def describe(ranks, folder):
    """Puts a manifest of the files that are there into the folder of a whole snapshot, on every host, so that it can
    be read as a checkpoint. Every rank calls it."""
    here = _said_in(folder) if ranks.leads and os.path.isdir(folder) else {}
    said = {int(rank): facts for told in ranks.gather(here) for rank, facts in told.items()}
    files = {name: record for facts in said.values() for name, record in facts["files"].items()}
    facts = {key: value for key, value in said[0].items() if key not in ("files", "rank")}

    def write():
        os.makedirs(folder, exist_ok=True)
        paths = {name: path_below(folder, name, "what a rank says of its snapshot") for name in files}
        there = {name: record for name, record in files.items() if os.path.exists(paths[name])}
        with open(os.path.join(folder, verify.NAME), "w") as file:
            file.write(verify.text_of(facts, there))

    ranks.lead(write, f"the snapshot {folder} cannot be read")


def undo(ranks, folder):
    """Removes what reading has added: the manifest, and files that came from other hosts. Every rank calls it."""
    ranks.gather(None)  # all have read
    if not ranks.leads:
        return
    own = {name for rank, facts in _said_in(folder).items() for name in (SAID_BY(rank=rank), *facts["files"])}
    for name in os.listdir(folder):
        if name not in own and os.path.isfile(os.path.join(folder, name)):
            os.unlink(os.path.join(folder, name))
