"""The logger: format, place, ranks, levels, once."""

import logging
import os
import re
import subprocess
import sys

import pytest

from deepspeed import log
from deepspeed.utils import logger
from deepspeed.utils.logging import LoggerFactory
from refusals import refused


@pytest.fixture(autouse=True)
def rank_1(monkeypatch):
    monkeypatch.setattr(log, "print_rank", lambda: 1)
    level = log.logger.level
    log.logger.setLevel(logging.INFO)
    yield
    log.logger.setLevel(level)


def test_format_names_the_caller_and_the_rank(capsys):
    log.log_dist("hello there")
    line = capsys.readouterr().out
    assert re.fullmatch(
        r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}\] \[INFO\] "
        r"\[test_log\.py:\d+:test_format_names_the_caller_and_the_rank\] \[Rank 1\] hello there\n",
        line,
    ), line
    assert logger is log.logger and logger.name == "DeepSpeed"


@pytest.mark.parametrize("ranks, heard", [(None, True), ([], True), ([0], False), ([0, 1], True), ([-1], True)])
def test_ranks_choose_who_speaks(ranks, heard, capsys):
    log.log_dist("text", ranks=ranks)
    log.log_dist_once(f"text for {ranks}", ranks=ranks)
    assert len(capsys.readouterr().out.splitlines()) == 2 * heard


def test_levels(capsys):
    log.log_dist("quiet", level=logging.DEBUG)
    log.set_log_level_from_string("Error")
    log.log_dist("nothing", level=logging.WARNING)
    log.log_dist("bad", level=logging.ERROR)
    assert "[ERROR]" in capsys.readouterr().out
    assert log.should_log_le("error") and not log.should_log_le("info")
    other = LoggerFactory.create_logger("other", logging.DEBUG)
    log.set_log_level_from_string("warn", custom_logger=other)
    assert other.level == logging.WARNING and other.propagate is False
    refused(ValueError, "'loud' is not a log level.*debug, info", log.set_log_level_from_string, "loud")
    refused(ValueError, "needs a name", LoggerFactory.create_logger, "")


def test_once(capsys):
    for number in range(3):
        log.log_dist_once("only once")
        log.warning_once(f"changing {number}", key="a key")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and "changing 0" in lines[1]


def first_line(**env):
    code = "from deepspeed.log import logger; print(logger.level); logger.info('x')"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p), **env)
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True).stdout


def test_environment_sets_the_level():
    assert first_line(DS_LOG_LEVEL="warning") == "30\n" and first_line(DS_LOG_LEVEL="10").startswith("10\n")
    assert first_line(DS_LOG_LEVEL="").startswith("20\n")
    assert "DS_LOG_LEVEL is ignored: 'noisy'" in first_line(DS_LOG_LEVEL="noisy")
