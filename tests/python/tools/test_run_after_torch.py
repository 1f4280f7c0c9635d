"""Processes that begin with torch (processes.run_after_torch) are new ones in every other respect."""

import os

from processes import run_after_torch

CODE = """
import atexit, os, sys
before = sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "deepspeed") and name.count(".") == 0)
atexit.register(print, "the end")
print(before, sys.argv, os.environ.get("DS_SAID"), os.getcwd(), __name__)
mark = 1
print("told", file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


def test_each_has_its_own_arguments_variables_folder_and_end(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for code, said in ((3, "a"), (0, "b")):
        done = run_after_torch(CODE, code, DS_SAID=said)
        expected = f"['torch'] ['-c', '{code}'] {said} {tmp_path} __main__\nthe end\n"
        assert (done.returncode, done.stdout, done.stderr) == (code, expected, "told\n")
    assert "DS_SAID" not in os.environ


def test_none_sees_what_another_has_done():
    assert run_after_torch("import torch; torch.mark = mark = 1").returncode == 0
    done = run_after_torch("import torch; print(hasattr(torch, 'mark'), 'mark' in globals())")
    assert done.stdout == "False False\n"


def test_errors_and_signals_are_told_as_by_python():
    done = run_after_torch("raise ValueError('so')")
    assert done.returncode == 1 and done.stderr.endswith("ValueError: so\n") and "Traceback" in done.stderr
    assert run_after_torch("import os; os.kill(os.getpid(), 9)").returncode == -9
