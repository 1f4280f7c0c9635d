"""Words of a command line: splits a line that a user wrote, and quotes words for the shell of another host.

``shlex`` does both, but importing it costs a tenth of the launcher's start.
"""

import re

_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")
_WORD = re.compile(r"""(?:[^\s"'\\]|\\.|"(?:[^"\\]|\\.)*"|'[^']*')+""", re.S)
_PIECE = re.compile(r"""\\(.)|"((?:[^"\\]|\\.)*)"|'([^']*)'""", re.S)


def quote(word):
    """``word`` as one word of a POSIX shell."""
    if word and _PLAIN.fullmatch(word):
        return word
    return "'" + word.replace("'", "'\"'\"'") + "'"


def join_words(words):
    """``words`` as one line for a POSIX shell."""
    return " ".join(map(quote, words))


def split_words(text):
    """The words of ``text`` by a shell's rules of quotes and backslashes; ValueError for a quote that is not closed."""
    words, rest = [], text or ""
    while rest.strip():
        rest = rest.lstrip()
        match = _WORD.match(rest)
        if not match:
            raise ValueError(f"{text!r} has a quote that is not closed.")
        words.append(_PIECE.sub(_plain, match[0]))
        rest = rest[match.end() :]
        if rest and not rest[0].isspace():
            raise ValueError(f"{text!r} has a quote that is not closed.")
    return words


def _plain(piece):
    if piece[1] is not None:
        return piece[1]
    if piece[2] is not None:
        return re.sub(r"\\([\"\\$`])", r"\1", piece[2])
    return piece[3]
