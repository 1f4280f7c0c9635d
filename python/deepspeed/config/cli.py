"""``ds_config``: explain, diff, schema and docs of DeepSpeed configurations."""

import argparse
import sys

from deepspeed._native import _C
from deepspeed.config.config import LEFT_TO_TRAINER, resolve
from deepspeed.host.command_line import check_output, program

ROOTS = ("training", "inference", "ragged_inference")


def explain(path, world=None):
    """The text of ``ds_config explain`` and whether the configuration is free of conflicts.

    Values that a trainer fills in ("auto", batch sizes) are listed under a title of their own and are not conflicts.
    """
    native, ranks, source = resolve(path, world_size=world, given_as="--world")
    broken = any(issue["severity"] == "error" and issue["code"] != LEFT_TO_TRAINER for issue in native.issues())
    return f"Data-parallel ranks: {ranks} ({source})\n{native.explain()}", not broken


def flatten(values, prefix=""):
    """``{dotted path: value}`` of the leaves of nested dicts; an empty dict is a leaf."""
    flat = {}
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat.update(flatten(value, path + "."))
        else:
            flat[path] = value
    return flat


def difference(first, second, world=None):
    """Lines ``key: a -> b`` for every resolved value in which two configurations differ."""
    a, b = (flatten(resolve(path, world_size=world)[0].values()) for path in (first, second))
    absent = "(absent)"
    return [
        f"{key}: {a.get(key, absent)!r} -> {b.get(key, absent)!r}"
        for key in list(a) + [key for key in b if key not in a]
        if a.get(key, absent) != b.get(key, absent)
    ]


_WORLD = {"type": int, "help": "number of ranks; default: WORLD_SIZE, or 1"}
_OUTPUT = {"help": "file to write; default: print"}
# command -> (help, arguments by their names)
_COMMANDS = {
    "explain": (
        "every value, where it comes from, and every conflict",
        {("file",): {"help": "JSON file (or url-safe base64 of one)"}, ("--world",): _WORLD},
    ),
    "diff": ("values in which two configurations differ", {("a",): {}, ("b",): {}, ("--world",): _WORLD}),
    "schema": (
        "a JSON Schema for editors",
        {
            ("--of",): {"choices": ROOTS, "default": "training", "help": "which configuration"},
            ("-o", "--output"): _OUTPUT,
        },
    ),
    "docs": ("the reference of all keys, in Markdown (docs/config.md)", {("-o", "--output"): _OUTPUT}),
}


def parser():
    top = argparse.ArgumentParser(prog="ds_config", description="Look at DeepSpeed configurations.")
    commands = top.add_subparsers(dest="command", required=True)
    for command, (purpose, arguments) in _COMMANDS.items():
        made = commands.add_parser(command, help=purpose)
        for names, options in arguments.items():
            made.add_argument(*names, **options)
    return top


def _write(text, output):
    if output is None:
        sys.stdout.write(text)
        return 0
    check_output(output, "--output")
    with open(output, "w", encoding="utf-8") as file:
        file.write(text)
    return 0


@program("ds_config", code=2)
def main(argv=None):
    """Exit status: 0 fine (diff: equal), 1 conflicts (diff: different), 2 the input cannot be read."""
    arguments = parser().parse_args(argv)
    if arguments.command == "explain":
        text, fine = explain(arguments.file, arguments.world)
        print(text, end="")
        return 0 if fine else 1
    if arguments.command == "diff":
        lines = difference(arguments.a, arguments.b, arguments.world)
        print("\n".join(lines) if lines else "No difference.")
        return 1 if lines else 0
    text = _C.config.docs() if arguments.command == "docs" else _C.config.json_schema(arguments.of)
    return _write(text, arguments.output)


if __name__ == "__main__":
    sys.exit(main())
