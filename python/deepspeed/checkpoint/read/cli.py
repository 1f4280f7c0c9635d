"""``ds_ckpt``: looks after checkpoints.

ds_ckpt ls DIR          the checkpoints of a directory
ds_ckpt verify DIR      reads every byte of them, or of one, and says which tensor of which file is damaged
ds_ckpt diff A B        compares two checkpoints parameter by parameter, whatever wrote them
ds_ckpt export DIR OUT  writes the weights of a checkpoint as model.safetensors
"""

import argparse
import collections
import json
import os
import sys
import time

from deepspeed.checkpoint.layouts import names
from deepspeed.checkpoint.write import verify
from deepspeed.host.command_line import program
from deepspeed.host.texts import table
from deepspeed.registry import load_target

# ---- listing -------------------------------------------------------------------------------------------------------
# The checkpoints of a directory, as ``ds_ckpt ls`` shows them.


class Entry(collections.namedtuple("Entry", "tag folder state files size facts is_latest")):
    """One checkpoint. ``state``: complete, damaged, short (files missing) or unknown (no manifest). ``files`` and
    ``size``: their number and bytes. ``facts``: what the manifest says."""

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
    found = os.listdir(folder) if os.path.isdir(folder) else ()
    return any(name == verify.NAME or names.is_checkpoint_file(name) for name in found)


def _entry(folder, tag, latest):
    sizes = [os.lstat(os.path.join(root, name)).st_size for root, _, found in os.walk(folder) for name in found]
    try:
        facts = verify.read(folder)
        short = facts and verify.missing_or_short(folder, facts)
        state = "unknown" if facts is None else "short" if short else "complete"
    except verify.DamagedManifest:
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
    latest, found = names.latest_tag(directory), []
    for root, folders, _ in os.walk(directory):
        folders[:] = [name for name in folders if not name.startswith(".")]
        if root != directory and is_checkpoint(root):
            found.append(_entry(root, os.path.relpath(root, directory), latest))
            folders.clear()
    if not found:
        raise FileNotFoundError(f"{directory} holds no checkpoint")
    return sorted(found, key=lambda entry: (entry.facts.get("saved_at", 0), entry.tag))


# ---- cli -----------------------------------------------------------------------------------------------------------


def _list(arguments):
    entries = checkpoints_of(arguments.directory)
    if arguments.json:
        facts = [{key: value for key, value in entry.facts.items() if key != "files"} for entry in entries]
        print(json.dumps([entry._replace(facts=said)._asdict() for entry, said in zip(entries, facts)]))
    else:
        print("\n".join(table([HEADER] + [entry.row() for entry in entries])))
    return 0


def _verify(arguments):
    entries, bad = checkpoints_of(arguments.directory), 0
    for entry in entries:
        problems = verify.verify_folder(entry.folder, threads=arguments.threads)
        bad += len(problems)
        known = "" if entry.facts else " (no manifest: only what the files say of themselves was compared)"
        print(f"{entry.folder}: " + (f"{len(problems)} problems{known}" if problems else f"every byte is right{known}"))
        for problem in problems:
            print(f"  {problem}")
    latest = None if is_checkpoint(arguments.directory) else names.latest_tag(arguments.directory)
    if latest is not None and latest not in [entry.tag for entry in entries]:
        print(f"{os.path.join(arguments.directory, 'latest')} names {latest!r}, which is not a checkpoint here")
        bad += 1
    return 1 if bad else 0


def _diff(arguments):
    # Reads tensors, so it needs torch; ls and verify run without.
    difference = load_target("deepspeed.checkpoint.convert.export:difference")
    lines = difference(arguments.a, arguments.b, limit=arguments.limit)
    print("\n".join(lines) if lines else "the same parameters, states and counters")
    return 1 if lines else 0


def _export(arguments):
    made = load_target("deepspeed.checkpoint.convert.export:export")(
        arguments.directory,
        arguments.output,
        tag=arguments.tag,
        dtype=arguments.dtype,
        max_shard_size=arguments.max_shard_size,
        safe_serialization=not arguments.torch_format,
        exclude_frozen_parameters=arguments.exclude_frozen_parameters,
    )
    print("\n".join(made))
    return 0


# Commands: the function that runs it, its help, and its arguments with the options of ``add_argument``.
_COMMANDS = {
    "ls": (
        _list,
        "list the checkpoints of a directory",
        {"directory": {}, "--json": {"action": "store_true", "help": "as JSON"}},
    ),
    "verify": (
        _verify,
        "compare every byte with the checksums written when it was saved",
        {
            "directory": {"help": "a directory of checkpoints, or one of them"},
            "--threads": {"type": int, "default": os.cpu_count(), "help": "files read at a time"},
        },
    ),
    "diff": (
        _diff,
        "compare two checkpoints of any number of ranks and any stage",
        {
            "a": {"help": "the folder of a tag, or a directory whose latest one is meant"},
            "b": {},
            "--limit": {"type": int, "default": 50, "help": "lines printed at most"},
        },
    ),
    "export": (
        _export,
        "write the weights of a checkpoint as model.safetensors",
        {
            "directory": {"help": "a directory of checkpoints, of which the latest is meant, or one of them"},
            "output": {"help": "folder for model.safetensors, or for shards and their index"},
            "-t --tag": {"help": "another one than the latest"},
            "--dtype": {"choices": ["fp32", "bf16", "fp16"], "default": "fp32", "help": "of the parameters"},
            "--max_shard_size": {"default": "5GB", "help": "largest file, like 5GB or 500MB"},
            "--torch_format": {"action": "store_true", "help": "pytorch_model.bin instead"},
            "--exclude_frozen_parameters": {"action": "store_true", "help": "leave out what was not trained"},
        },
    ),
}


@program("ds_ckpt", code=2)
def main(args=None):
    parser = argparse.ArgumentParser(prog="ds_ckpt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    for name, (run, about, options) in _COMMANDS.items():
        command = commands.add_parser(name, help=about)
        command.set_defaults(run=run)
        for flags, how in options.items():
            command.add_argument(*flags.split(), **how)
    arguments = parser.parse_args(args)
    return arguments.run(arguments)


if __name__ == "__main__":
    sys.exit(main())
