"""Reading, checking and resolving a file that gives every key takes less than a millisecond; on a machine where
Python's json takes longer than 50 us to parse the same text, less than 20 times as long as that."""

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
    took, parsed = [], []
    deadline = time.monotonic() + 5

    def limit():
        return max(1e-3, 20 * min(parsed))

    # The best of many: other work on the machine makes single runs longer.
    while len(took) < 50 or (min(took) >= limit() and time.monotonic() < deadline):
        start = time.perf_counter()
        native = _C.config.resolve_text(text, source="ds.json", other_names=names)
        took.append(time.perf_counter() - start)
        start = time.perf_counter()
        json.loads(text)
        parsed.append(time.perf_counter() - start)
    assert native.values()["train_batch_size"] == 8
    assert min(took) < limit(), f"{min(took) * 1e3:.2f} ms, json {min(parsed) * 1e3:.3f} ms"
