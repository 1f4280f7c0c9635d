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
