"""Hostfiles and the --include/--exclude language."""

import pytest

from deepspeed.launcher import runner
from deepspeed.launcher.resources import decode_world_info
from refusals import refused

HOSTS = {"worker-0": [0, 1, 2, 3], "worker-1": [0, 1, 2, 3]}


def test_hostfile_with_comments_and_blank_lines():
    lines = """
    # the cluster
    worker-1 slots=2
      worker-2   slots=3   # the new one

    localhost slots=1
    123.23.12.10 slots=2
    """.splitlines()
    pool = runner._parse_hostfile(lines)
    assert pool == {"worker-1": 2, "worker-2": 3, "localhost": 1, "123.23.12.10": 2}
    assert list(pool) == ["worker-1", "worker-2", "localhost", "123.23.12.10"]


@pytest.mark.parametrize(
    "text, named",
    [
        ("worker-1 slots=2\nworker-1 slots=4", "worker-1"),
        ("this is no hostfile", "this is no hostfile"),
        ("worker-1 slots=two", "slots=two"),
        ("worker-1", "worker-1"),
        ("worker-1 slots=1 more", "more"),
        ("", "no host"),
        ("# nobody\n\n", "no host"),
    ],
)
def test_bad_hostfiles_name_the_line(text, named):
    refused(ValueError, named, runner._parse_hostfile, text.splitlines())


@pytest.mark.parametrize(
    "include, exclude, left",
    [
        ("", "", HOSTS),
        ("worker-0", "", {"worker-0": [0, 1, 2, 3]}),
        ("worker-1:0,2", "", {"worker-1": [0, 2]}),
        ("worker-1:2,0,2", "", {"worker-1": [0, 2]}),
        ("worker-1@worker-0:3", "", {"worker-0": [3], "worker-1": [0, 1, 2, 3]}),
        ("worker-0:0@worker-0:1", "", {"worker-0": [0, 1]}),
        ("", "worker-0", {"worker-1": [0, 1, 2, 3]}),
        ("", "worker-1:0", {"worker-0": [0, 1, 2, 3], "worker-1": [1, 2, 3]}),
        ("", "worker-1:0,1,2,3", {"worker-0": [0, 1, 2, 3]}),
        ("", "worker-0:1@worker-1:0,3", {"worker-0": [0, 2, 3], "worker-1": [1, 2]}),
    ],
)
def test_filters(include, exclude, left):
    found = runner.parse_resource_filter(HOSTS, include_str=include, exclude_str=exclude)
    assert found == left and list(found) == [host for host in HOSTS if host in left]


@pytest.mark.parametrize(
    "include, exclude, named",
    [
        ("worker-0", "worker-1", "exclude each other"),
        ("jeff", "", "jeff"),
        ("", "jeff", "jeff"),
        ("worker-1:42", "", "42"),
        ("", "worker-1:0,42", "42"),
        ("worker-1:", "", "NODE:SLOT"),
        ("worker-1@", "", "NODE"),
        (":0", "", "NODE"),
    ],
)
def test_bad_filters_name_host_and_slot(include, exclude, named):
    refused(ValueError, named, runner.parse_resource_filter, HOSTS, include_str=include, exclude_str=exclude)


def test_world_info_travels_as_one_word():
    text = runner.encode_world_info(HOSTS)
    assert text.replace("-", "").replace("_", "").rstrip("=").isalnum() and decode_world_info(text) == HOSTS
    for wrong in ("", "xx", "é", runner.encode_world_info([1]), runner.encode_world_info({"a": "b"})):
        refused(ValueError, f"--world_info '{wrong}' is not what encode_world_info makes", decode_world_info, wrong)
