"""Whether a Python package is installed, without importing it."""

import importlib.util
import sys


def is_installed(name):
    """Whether the module ``name`` can be imported. Parents of a dotted name are imported.

    A module that a program made and put into ``sys.modules`` counts, also without a ``__spec__``, for which ``find_spec``
    raises a ValueError.
    """
    if name in sys.modules:
        return sys.modules[name] is not None
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False  # the parent is missing
