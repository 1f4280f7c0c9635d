"""The end of programs: one line on stderr and an exit code, whatever goes wrong."""

import os
import signal
import subprocess
import sys

import pytest

from deepspeed.host.command_line import check_output, check_slots, program
from deepspeed.launcher import arguments, launch, launcher_helper, on_hosts
from refusals import refused


@pytest.mark.parametrize(
    "error, code, told",
    [
        (FileNotFoundError(2, "No such file or directory", "a.json"), 3, "prog: a.json: No such file or directory"),
        (ValueError("--world is 0"), 3, "prog: --world is 0"),
        (RuntimeError("no device"), 3, "prog: no device"),
        (MemoryError(), 3, "prog: there is not enough memory"),
        (KeyboardInterrupt(), 128 + signal.SIGINT, "prog: interrupted"),
    ],
)
def test_an_error_is_one_line(error, code, told, capsys):
    @program("prog", code=3)
    def main(args=None):
        raise error

    assert main([]) == code
    assert capsys.readouterr().err == told + "\n"


def test_exit_codes_pass_through():
    assert program("prog")(lambda args: args)(5) == 5
    refused(SystemExit, "", program("prog")(sys.exit), 4)
    refused(KeyError, "", program("prog")(lambda args: {}[args]))  # a fault of the program itself keeps its traceback


PRINTS = "import sys\nfrom deepspeed.host.command_line import program\n"
PRINTS += "sys.exit(program('prog')(lambda args: print('line\\n' * 100000) or 0)())\n"


def run_shell(command):
    environment = {**os.environ, "PY": sys.executable, "CODE": PRINTS}
    return subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60)


def test_a_full_disk_behind_standard_output():
    done = run_shell('"$PY" -c "$CODE" > /dev/full')
    assert done.returncode == 1
    assert done.stderr == "prog: standard output cannot be written: No space left on device\n"


def test_a_reader_that_has_gone():
    done = run_shell('"$PY" -c "$CODE" | head -n 1; exit ${PIPESTATUS[0]}')
    assert (done.returncode, done.stdout, done.stderr) == (128 + signal.SIGPIPE, "line\n", "")


def test_outputs_are_tried_and_left_as_they_are(tmp_path):
    kept = tmp_path / "kept"
    kept.write_text("mine")
    check_output(str(kept), "-o")
    check_output(str(tmp_path / "new"), "-o")
    check_output(None, "-o")
    assert kept.read_text() == "mine" and not (tmp_path / "new").exists()
    refused(OSError, "-o .*: the file cannot be written: Is a directory", check_output, str(tmp_path), "-o")
    refused(OSError, "No such file", check_output, str(tmp_path / "no" / "file"), "-o")


def test_slots_have_a_limit():
    check_slots(65536, "slots of the host a")
    refused(
        ValueError,
        "slots of the host a is 99999999999; a host has at most",
        check_slots,
        99999999999,
        "slots of the host a",
    )


@pytest.mark.parametrize(
    "words, script, rest",
    [
        ("train.py --b 1 --num 5 --m x --inc y --no -q", "train.py", "--b 1 --num 5 --m x --inc y --no -q"),
        ("--num_gpu 3 t.py --num_gpus 7", "t.py", "--num_gpus 7"),  # completed before the script, untouched behind it
        ("-Hhosts --include=a t.py -- --x", "t.py", "-- --x"),
        ("-H hosts -q t.py", "t.py", ""),
        ("--module pkg.mod --no", "pkg.mod", "--no"),
        ("-- t.py -- a", "t.py", "-- a"),
    ],
)
def test_options_behind_the_script_are_the_scripts(words, script, rest):
    found = arguments.parse_args(words.split())
    assert (found.user_script, found.user_args) == (script, rest.split())


def test_every_program_that_starts_another_leaves_its_options_alone():
    found = launch.parse_args("--node_rank 0 t.py --no -q --node 3".split())
    assert (found.training_script, found.training_script_args) == ("t.py", "--no -q --node 3".split())
    assert launcher_helper.parse_args("--launcher openmpi t.py --l x".split()).user_args == ["--l", "x"]
    assert on_hosts.parse_args("-f hosts ls --host -f".split()).command == "ls --host -f".split()
