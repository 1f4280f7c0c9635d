"""The logger: format, place, ranks, levels, once."""

import logging
import re

import pytest

from deepspeed import log
from deepspeed.utils import logger
from deepspeed.utils.logging import LoggerFactory
from processes import run_python
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


@pytest.mark.parametrize(
    "level, said", [("warning", "30\n"), ("10", "10\n"), ("", "20\n"), ("noisy", "DS_LOG_LEVEL is ignored: 'noisy'")]
)
def test_environment_sets_the_level(level, said):
    code = "from deepspeed.log import logger; print(logger.level); logger.info('x')"
    found = run_python(code, DS_LOG_LEVEL=level).stdout
    assert said in found if level == "noisy" else found == said if level == "warning" else found.startswith(said)
