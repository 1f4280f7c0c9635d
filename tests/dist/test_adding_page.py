"""The test that docs/adding.md shows is a test that passes."""

import os
import re
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def test_example_of_the_page(tmp_path):
    with open(os.path.join(ROOT, "docs", "adding.md"), encoding="utf-8") as file:
        (block,) = [
            code for code in re.findall(r"^```python\n(.*?)^```", file.read(), re.M | re.S) if "run_ranks" in code
        ]
    (tmp_path / "test_block.py").write_text(block)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    paths = [os.path.join(ROOT, "tests", "dist"), os.path.join(ROOT, "python")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_block.py"], cwd=tmp_path, text=True,
        capture_output=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, timeout=120,
    )  # fmt: skip
    assert run.returncode == 0 and "1 passed" in run.stdout, run.stdout + run.stderr
