"""The published interface is here, name by name; what is not is a row of a table, with its reason."""

import os
import sys

import pytest

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import surface  # noqa: E402
from surface_tables import INNER, LATER, OWN_PARAMETERS  # noqa: E402

SURFACE = surface.load()
EXCUSED = {name: reason for table in (LATER, INNER) for reason, names in table.items() for name in names}
# A name may be importable from several modules.
SHORT = {name.split(":")[-1] for name in EXCUSED}


def differences(module):
    return surface.problems_of(module, SURFACE[module], OWN_PARAMETERS)


@pytest.mark.parametrize("module", sorted(SURFACE))
def test_names_and_signatures(module):
    found = {name: text for name, text in differences(module).items() if name.split(":")[-1] not in SHORT}
    assert not found, "\n".join(f"{name} {text}" for name, text in found.items())


def test_every_row_of_the_tables_is_still_missing():
    here = sorted(set(EXCUSED) - {name for module in SURFACE for name in differences(module)})
    assert not here, f"these are here now: take their rows out of tests/python/surface_tables.py: {here}"


def test_a_name_has_one_reason():
    names = [name for table in (LATER, INNER) for names in table.values() for name in names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "entry, text",
    [
        ({"kind": "function", "signature": "(a, b=1)"}, None),
        ({"kind": "function", "signature": "(a, b=2)"}, "default of 'b'"),
        ({"kind": "function", "signature": "(b, a=1)"}, "takes"),
        ({"kind": "class", "signature": "()"}, "published is a class"),
    ],
)
def test_the_comparison_itself(entry, text):
    def function(a, b=1):
        return a, b

    found = surface.compare(entry, function, sys.modules[__name__], {})
    assert (not found) if text is None else text in found[0][1]
