"""Environment variables that hold numbers."""

import os


def number(name, default, what="a number of seconds", error=ValueError, variables=os.environ, kind=float):
    """The number in the variable ``name``, or ``default``; ``error``, which says ``what`` it is, for other text."""
    text = variables.get(name, "")
    try:
        return kind(text) if text else default
    except ValueError:
        raise error(f"the environment variable {name} is {text!r}; it is {what}.") from None
