"""The question whether to resume, and the figures of the bar."""

import os
import sys

import pytest

import progress


def answer(text, monkeypatch):
    """The answer of confirm() to ``text`` typed at a terminal."""
    ours, theirs = os.openpty()
    os.write(ours, text)
    with os.fdopen(theirs, "r", closefd=False) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        result = progress.confirm("Go on?", patience_s=0.2)
    os.close(ours)
    os.close(theirs)
    return result


@pytest.mark.parametrize(
    "text, expected", [(b"n\n", False), (b"No\n", False), (b"y\n", True), (b"\n", True), (b"", True)]
)
def test_confirm_on_a_terminal(text, expected, monkeypatch):
    assert answer(text, monkeypatch) is expected


def test_confirm_without_a_terminal_says_yes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    assert progress.confirm("Go on?") is True
    assert "Nobody to ask" in capsys.readouterr().out


def test_speed_and_time_left(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    bar = progress.Progress(first=10, total=110, tokens_per_step=1000, show=False)
    for step in range(11, 61):
        clock[0] += 0.5
        bar.advance(step)
    assert bar.tokens_per_second == pytest.approx(2000) and bar.eta_s == pytest.approx(25)
    assert progress.duration(bar.eta_s) == "0:25"


def test_plain_lines_where_there_is_no_terminal(monkeypatch, capsys):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "time", lambda: clock[0])
    with progress.Progress(first=0, total=40, tokens_per_step=100, show=True) as bar:
        for step in range(1, 41):
            clock[0] += 1.0
            bar.report(step, 5.0, 1e-3, [512e6, 498e6])
            bar.advance(step)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", "11/40", "21/40", "31/40", "40/40"]
    assert lines[0] == "step    1/40  loss 5.000  lr 1.0e-03  100 tokens/s  memory 512 + 498 MB  ETA 0:39"
