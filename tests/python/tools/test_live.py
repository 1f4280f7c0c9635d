"""The one line that the long parts of a first `make` show instead of a flood (`live` of tools/common.sh)."""

import subprocess

from places import ROOT


def shell(script):
    run = subprocess.run(["bash", "-c", f". tools/common.sh\n{script}"], cwd=ROOT, capture_output=True, text=True)
    return run.returncode, run.stderr.splitlines()


def test_says_what_how_far_and_how_long():
    code, lines = shell("printf '@1 12 zero engine\\n@12 12 done\\n' | live 'building' 0")
    assert code == 0
    assert [line.replace("0:01", "0:00") for line in lines] == [
        "==> building: 1 of 12, 0:00, zero engine",
        "==> building: 12 of 12, 0:00, done",
        "==> building: 12 of 12 in 0:00",
    ]


def test_without_a_terminal_few_lines():
    code, lines = shell("for i in $(seq 200); do echo \"@$i 200 file\"; done | live 'building'")
    assert code == 0
    assert len(lines) == 1 and lines[0].startswith("==> building: 200 of 200 in ")


def test_percents():
    assert shell("printf '@41 %% fetched\\n' | live 'installing packages' 0")[1][0].startswith(
        "==> installing packages: 41 %, 0:0"
    )


def test_errors_pass_through_and_the_failure_is_seen():
    code, lines = shell("{ echo '@1 2 x'; echo 'x.cpp:1: error: y'; false; } | live 'building' || exit 7")
    assert code == 7
    assert "x.cpp:1: error: y" in lines


def test_nothing_to_do_says_nothing():
    assert shell("live 'building' </dev/null") == (0, [])
