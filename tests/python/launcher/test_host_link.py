"""The program that leads to a host, or to all, and what it has started."""

import os

import pytest

from deepspeed.launcher import linux
from deepspeed.launcher.host_link import Way
from processes import running, wait_for

pytestmark = pytest.mark.dist
# Starts one that cleans up when it is asked to end, as an agent does with its memory.
STARTS_ANOTHER = (
    "(trap 'sleep 0.2; touch cleaned; exit' TERM; echo $BASHPID >pid.part; mv pid.part pid; "
    "while :; do sleep 0.05; done) & wait"
)


@pytest.mark.parametrize("with_link", [False, True])
def test_what_it_started_is_asked_to_end_unless_a_link_leads_there(with_link, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    way = Way(["bash", "-c", STARTS_ANOTHER], dict(os.environ), with_link)
    wait_for(lambda: os.path.exists("pid"))
    pid = int((tmp_path / "pid").read_text())
    way.end()
    try:
        assert way.process.poll() is not None
        if with_link:
            assert running(pid) and not os.path.exists("cleaned")
        else:
            wait_for(lambda: os.path.exists("cleaned") and not running(pid))
    finally:
        linux.kill(pid, 9)
