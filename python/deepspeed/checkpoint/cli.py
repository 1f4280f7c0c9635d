"""``ds_ckpt``: looks after checkpoints.

ds_ckpt ls DIR          the checkpoints of a directory
ds_ckpt verify DIR      reads every byte of them, or of one, and says which tensor of which file is damaged
ds_ckpt diff A B        compares two checkpoints parameter by parameter, whatever wrote them
"""

import argparse
import json
import os
import sys

from deepspeed.checkpoint import listing, names, verify
from deepspeed.registry import load_target


def _table(rows):
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def _list(arguments):
    entries = listing.checkpoints_of(arguments.directory)
    if arguments.json:
        print(json.dumps([{**vars(e), "facts": {k: v for k, v in e.facts.items() if k != "files"}} for e in entries]))
    else:
        print(_table([listing.HEADER] + [entry.row() for entry in entries]))
    return 0


def _verify(arguments):
    entries = listing.checkpoints_of(arguments.directory)
    bad = 0
    for entry in entries:
        problems = verify.verify_folder(entry.folder, threads=arguments.threads)
        bad += len(problems)
        known = "" if entry.facts else " (no manifest: only what the files say of themselves was compared)"
        print(f"{entry.folder}: " + (f"{len(problems)} problems{known}" if problems else f"every byte is right{known}"))
        for problem in problems:
            print(f"  {problem}")
    parent = arguments.directory if not listing.is_checkpoint(arguments.directory) else None
    latest = names.latest_tag(parent) if parent else None
    if latest is not None and latest not in [entry.tag for entry in entries]:
        print(f"{os.path.join(parent, 'latest')} names {latest!r}, which is no checkpoint here")
        bad += 1
    return 1 if bad else 0


def _diff(arguments):
    # Reads tensors, so it needs torch; ls and verify run without.
    differ = load_target("deepspeed.checkpoint.difference:difference")
    lines = differ(arguments.a, arguments.b, limit=arguments.limit)
    print("\n".join(lines) if lines else "the same parameters, states and counters")
    return 1 if lines else 0


def main(args=None):
    parser = argparse.ArgumentParser(prog="ds_ckpt", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    ls = commands.add_parser("ls", help="list the checkpoints of a directory")
    ls.add_argument("directory")
    ls.add_argument("--json", action="store_true", help="as JSON")
    ls.set_defaults(run=_list)
    check = commands.add_parser("verify", help="compare every byte with the checksums written when it was saved")
    check.add_argument("directory", help="a directory of checkpoints, or one of them")
    check.add_argument("--threads", type=int, default=os.cpu_count(), help="files read at a time")
    check.set_defaults(run=_verify)
    diff = commands.add_parser("diff", help="compare two checkpoints of any number of ranks and any stage")
    diff.add_argument("a", help="the folder of a tag, or a directory whose latest one is meant")
    diff.add_argument("b")
    diff.add_argument("--limit", type=int, default=50, help="lines printed at most")
    diff.set_defaults(run=_diff)
    arguments = parser.parse_args(args)
    try:
        return arguments.run(arguments)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"ds_ckpt: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
