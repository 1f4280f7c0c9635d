"""Reading, checking and resolving a file that gives every key takes less than a millisecond."""

import json
import time

import pytest

from deepspeed._native import _C
from deepspeed.config.model import layout
from deepspeed.config.read import other_names


def filled(fields):
    """The default of every key, also in the sections that are null when they are absent."""
    return {key: filled(facts["fields"]) if facts["fields"] else facts["default"] for key, facts in fields.items()}


@pytest.mark.alone
def test_a_file_of_every_key_is_resolved_within_a_millisecond():
    text = json.dumps({**filled(layout("training")), "train_batch_size": 8}, indent=1).encode()
    assert text.count(b":") > 470
    names = other_names()
    took = []
    deadline = time.monotonic() + 5
    # The best of many: other work on the machine makes single runs longer.
    while len(took) < 50 or (min(took) >= 1e-3 and time.monotonic() < deadline):
        start = time.perf_counter()
        native = _C.config.resolve_text(text, source="ds.json", other_names=names)
        took.append(time.perf_counter() - start)
    assert native.values()["train_batch_size"] == 8
    assert min(took) < 1e-3, f"{min(took) * 1e3:.2f} ms"
