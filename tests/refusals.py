"""The check that a call is refused."""

import contextlib

import pytest


def refused(kind, words, call, /, *args, **options):
    """``call(*args, **options)`` raises a ``kind`` whose text contains the regular expression ``words``. Returns the
    error."""
    with pytest.raises(kind, match=words or None) as error:
        call(*args, **options)
    return error.value


@contextlib.contextmanager
def refusing(kind, *texts):
    """The block raises a ``kind`` whose text has all of ``texts``."""
    with pytest.raises(kind) as error:
        yield
    assert all(text in str(error.value) for text in texts), str(error.value)
