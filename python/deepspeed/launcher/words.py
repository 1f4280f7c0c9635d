"""Words of a command line: splits a line that a user wrote, and quotes words for the shell of another host."""

import shlex

quote, join_words = shlex.quote, shlex.join


def split_words(text):
    """The words of ``text`` by a shell's rules of quotes and backslashes; ValueError for a quote that is not closed."""
    try:
        return shlex.split(text or "")
    except ValueError:
        raise ValueError(f"{text!r} has a quote that is not closed.") from None
