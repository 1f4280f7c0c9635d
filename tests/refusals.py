"""The check that a call is refused."""

import pytest


def refused(kind, words, call, /, *args, **options):
    """``call(*args, **options)`` raises a ``kind`` whose text contains the regular expression ``words``. Returns the
    error."""
    with pytest.raises(kind, match=words or None) as error:
        call(*args, **options)
    return error.value
