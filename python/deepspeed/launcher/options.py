"""Options of command lines as tables, and those that several programs of this package have."""


def switch(text):
    """The row of an option without a value."""
    return {"action": "store_true", "help": text}


# The command of a rank.
COMMAND_OPTIONS = {
    "--module": switch("the script is a module name, as for python -m"),
    "--no_python": switch("the script is a program of its own"),
    "--no_local_rank": switch("do not pass --local_rank=N to the script"),
}


def add_options(parser, options):
    """Adds the rows of ``options``: names, separated by blanks, and the further arguments of ``add_argument``."""
    for names, more in options.items():
        parser.add_argument(*names.split(), **more)
    return parser


def parse_command(parser, words, rest, namespace=None):
    """Parses ``words``, of which those behind the first that is not an option (the script) belong to the script.

    argparse would complete and refuse the script's options, too: ``deepspeed train.py --b 1``.

    Args:
        rest: the attribute of the namespace that gets the script's arguments, a list.
    """
    words = list(words)
    script = _first_positional(parser, words)
    found = parser.parse_args(words[: script + 1], namespace)
    setattr(found, rest, words[script + 1 :])
    return found


def _first_positional(parser, words):
    # The index of the first word that is neither an option nor its value; the number of words if there is none.
    actions = parser._option_string_actions
    at = 0
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        if word == "--":
            return at + 1
        name, is_glued, _ = word.partition("=")
        if name not in actions and not name.startswith("--"):  # -Hfile
            name, is_glued = name[:2], True
        fits = {id(action): action for key, action in actions.items() if key == name}
        fits = fits or {id(action): action for key, action in actions.items() if key.startswith(name)}
        takes_value = len(fits) == 1 and next(iter(fits.values())).nargs != 0
        at += 2 if takes_value and not is_glued else 1
    return min(at, len(words))
