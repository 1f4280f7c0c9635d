"""The output that ranks have written by the time they are gone."""

import os
import selectors
import types
from unittest import mock

from deepspeed.launcher import supervisor


def test_what_is_in_the_channels_is_read_however_long_it_takes(monkeypatch):
    """On a busy machine time is up before anything was read, and it is read in several turns."""
    channel = mock.Mock(**{"pump.side_effect": [True] * 4 + [False]})
    monkeypatch.setattr(supervisor, "_DRAIN_S", 0.0)
    job, (read, write) = object.__new__(supervisor.Supervisor), os.pipe()
    job._selector, job._files = selectors.DefaultSelector(), []
    job._messages = types.SimpleNamespace(fd=-1, read=lambda: [])
    job._selector.register(read, selectors.EVENT_READ, channel)
    os.write(write, b"there is more")
    job._drain()
    assert channel.pump.call_count == 5 and channel.close.called
    os.close(read)
    os.close(write)
