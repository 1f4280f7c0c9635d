"""The page about a run: its charts and tables, lines that cannot be read, values that are missing, a resumed run."""

import json
import math
import os
import subprocess
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from deepspeed.profiling import report
from places import PYTHON

GIB = 2**30
RUN = {
    "kind": "run", "version": 1, "world_size": 2, "ranks": ["a", "b"], "start": 1_700_000_000, "config": {},
    "config_changed": {"train_batch_size": 8, "optimizer.type": "<Adam>"},
}  # fmt: skip


def step(number, **more):
    phases = {phase: 0.01 for phase in report.PHASES} | {"forward": 0.02}
    memory = {owner: GIB // 4 for owner in report.OWNERS} | {"peak": 3 * GIB}
    return {
        "kind": "step", "step": number, "samples": 8 * number, "wall": 0.1, "phases": phases, "loss": 4 / number,
        "lr": 0.001, "grad_norm": 1.0, "loss_scale": 64.0, "skipped": False, "memory": memory, "mfu": 0.25,
        "samples_per_sec": 80.0, "tokens_per_sec": 640.0, **more,
    }  # fmt: skip


def test_rates_are_sums_over_sums(tmp_path):
    """Ten steps of ten samples take ten seconds, although half of them are fast."""
    walls = [0.01, 1.99] * 5
    rows = [
        step(number + 1, wall=wall, samples_per_sec=10 / wall, tokens_per_sec=100 / wall, mfu=0.1 / wall)
        for number, wall in enumerate(walls)
    ]
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(map(json.dumps, [RUN, *rows])))
    found = facts(Page(report.page(report.Run(path))))
    assert found["samples per second, mean"] == "10" and found["tokens per second, mean"] == "100"
    assert found["share of peak flops (MFU), mean"] == "0.1"
    assert report.rate([None, 4.0, 8.0], [1.0, 3.0, 1.0]) == 5.0 and report.rate([None], [1.0]) is None


def ranks(number, rank, host, phase, gap):
    low = {phase: 0.01}
    return {
        "kind": "ranks", "step": number, "min": low, "max": {phase: 0.01 + gap}, "slowest_rank": rank,
        "slowest_phase": phase, "host": host,
    }  # fmt: skip


LINES = [RUN, *[step(number, skipped=number == 7) for number in range(1, 21)]]
LINES += [ranks(10, 1, "b", "data", 0.05), ranks(20, 1, "b", "data", 0.07), ranks(30, 0, "a", "optimizer", 0.001)]


class Page(HTMLParser):
    """Headings, rows of cells and SVG elements; checks that what is opened is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.headings, self.rows, self.links, self.svgs = [], [], [], [], text.split("<svg")[1:]
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]
        if tag != "meta":
            self.open.append(tag)
        if tag == "tr":
            self.rows.append([])

    def handle_startendtag(self, tag, attributes):
        self.links += [value for name, value in attributes if name in ("href", "src", "xlink:href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] in (["td"], ["th"]):
            self.rows[-1].append(data)


def made(tmp_path, lines, tail="", plan=None):
    source = tmp_path / "run.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    report.write_report(str(source), str(tmp_path / "pages" / "run.html"), plan)
    text = (tmp_path / "pages" / "run.html").read_text()
    page = Page(text)
    assert not page.links and "http" not in text and "@import" not in text and "url(" not in text
    for svg in page.svgs:
        ElementTree.fromstring("<svg" + svg.split("</svg>")[0] + "</svg>")
    return page


def facts(page):
    return {row[0]: row[1] for row in page.rows if len(row) == 2}


def test_a_whole_run(tmp_path):
    page = made(tmp_path, LINES)
    assert page.headings == [
        "Loss", "Learning rate", "Gradient norm", "Loss scale", "Throughput, samples per second",
        "Phases of a step, seconds", "Memory by owner, GiB", "Slowest ranks", "Configuration that is not the default",
    ]  # fmt: skip
    found = facts(page)
    assert found["ranks"] == "2" and found["hosts"] == "a, b" and found["steps"] == "20 (1 to 20)"
    assert found["seconds of steps"] == "2" and found["seconds of a step, mean"] == "0.1"
    assert found["samples per second, mean"] == "80" and found["tokens per second, mean"] == "640"
    assert found["share of peak flops (MFU), mean"] == "0.25" and found["peak of memory, GiB"] == "3"
    assert found["skipped steps"] == "1: 7" and "lines that cannot be read" not in found
    assert found["optimizer.type"] == "<Adam>" and found["train_batch_size"] == "8"
    slow = [row for row in page.rows if row[0] in ("0", "1") and len(row) == 5]
    assert slow == [["1", "b", "data", "2", "0.06"], ["0", "a", "optimizer", "1", "0.001"]]


def test_charts_show_the_values(tmp_path):
    """The points of a line, in pixels, back to values: least and most are the lower and the upper edge."""
    svg = made(tmp_path, LINES).svgs[0]
    line = next(part for part in svg.split('<path d="')[1:] if part.startswith("M70.0,10.0"))  # loss 4 at step 1
    points = [tuple(map(float, one.split(","))) for one in line.split('"')[0][1:].replace("h.1", "").split("L")]
    high = report.HEIGHT - report.BOTTOM
    losses = [0.2 + (4 - 0.2) * (high - y) / (high - 10) for _, y in points]
    assert losses == pytest.approx([4 / number for number in range(1, 21)], abs=0.002)
    assert points[-1][0] == report.WIDTH - 5 and ">step 20</text>" in svg
    assert svg.count('stroke="#c33"') == 1  # the skipped step


def test_areas_are_stacked(tmp_path):
    phases, memory = made(tmp_path, LINES).svgs[5:7]
    assert phases.count("<title>") == len(report.PHASES) and memory.count("<title>") == len(report.OWNERS)
    assert ">0.1</text>" in phases and ">1.5</text>" in memory  # the sum of all is the upper edge
    assert "<title>forward 20.0%</title>" in phases and "<title>data 10.0%</title>" in phases


def test_what_is_missing_or_cannot_be_read(tmp_path):
    """A torn last line, lines of others, steps with nothing in them, values that are not numbers, a gap in a line."""
    bare = [{"kind": "step", "step": 1}, {"kind": "step", "step": 2, "phases": None, "memory": 3, "loss": None}]
    odd = [step(number, loss=math.nan if number == 5 else 1.0, grad_norm="inf") for number in range(3, 8)]
    more = [{"kind": "ranks", "step": 4}, {"kind": "step"}, [1], {"kind": "new"}]
    page = made(tmp_path, [RUN, *bare, *odd, *more], tail='{"kind": "step", "step": 9, "lo')
    assert facts(page)["lines that cannot be read"] == "4" and facts(page)["steps"] == "7 (1 to 7)"
    assert "Gradient norm" not in page.headings and page.svgs[0].count("M") >= 3
    assert ["?", "?", "1", "?"] in page.rows
    for lines in ([], [RUN], bare[:1]):
        assert made(tmp_path, lines).headings[-2:] == ["Slowest ranks", "Configuration that is not the default"]


PLAN = {
    "ranks": [
        {"peak_bytes": GIB, "seconds": {"forward": 9.0}},
        {"peak_bytes": 2 * GIB, "seconds": {"forward": 0.015, "backward": 0.012, "step": 0.5, "communication": 0.0}},
    ],
    "peak_bytes": 2 * GIB, "seconds": 0.125, "mfu": 0.5,
}  # fmt: skip


def test_a_plan_beside_the_run(tmp_path):
    """The figures of the rank that needs most memory."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    page = made(tmp_path, LINES, plan=str(tmp_path / "plan.json"))
    assert page.headings[0] == "Plan and run"
    rows = {row[0]: row[1:] for row in page.rows if len(row) == 3}
    assert rows["forward, seconds"] == ["0.015", "0.02"] and rows["backward, seconds"] == ["0.012", "0.01"]
    assert rows["step, seconds"] == ["0.5", "0.02"] and rows["communication, seconds"] == ["0", "0.02"]
    assert rows["whole step, seconds"] == ["0.125", "0.1"] and rows["peak of memory, GiB"] == ["2", "3"]
    assert rows["share of peak flops (MFU)"] == ["0.5", "0.25"]
    empty = made(tmp_path, [RUN], plan=str(tmp_path / "plan.json"))
    assert ["whole step, seconds", "0.125", "-"] in empty.rows
    (tmp_path / "plan.json").write_text("[]")
    with pytest.raises(ValueError, match="plan.json is not a plan: write the output of ds_plan --json to it"):
        made(tmp_path, LINES, plan=str(tmp_path / "plan.json"))


def test_a_resumed_run_counts_each_step_once(tmp_path):
    page = made(tmp_path, [*LINES[:15], {**RUN, "start": 1_800_000_000}, *[step(n, wall=0.3) for n in range(11, 21)]])
    assert facts(page)["steps"] == "20 (1 to 20)" and facts(page)["seconds of steps"] == "4"
    assert facts(page)["began"].startswith("2023")


def test_a_long_run_has_as_many_points_as_a_chart_shows(tmp_path):
    page = made(tmp_path, [RUN, *[step(number, skipped=number % 3 == 0) for number in range(1, 5001)]])
    assert page.svgs[0].count("L") <= report.POINTS and page.svgs[0].count('stroke="#c33"') <= report.POINTS
    assert ">step 5000</text>" in page.svgs[0] and facts(page)["skipped steps"].startswith("1666: 3, 6")
    assert sum(map(len, page.svgs)) < 500_000


def test_the_program(tmp_path):
    source = tmp_path / "run.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    command, env = [sys.executable, "-m", "deepspeed.profiling.report"], {**os.environ, "PYTHONPATH": PYTHON}
    run = subprocess.run([*command, str(source)], env=env, capture_output=True, text=True)
    assert run.returncode == 0 and run.stdout == f"{tmp_path / 'run.html'}\n"
    assert (tmp_path / "run.html").read_text() == report.page(report.Run(source))
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    both = [*command, str(source), "--plan", str(tmp_path / "plan.json")]
    assert subprocess.run(both, env=env).returncode == 0 and "Plan and run" in (tmp_path / "run.html").read_text()
    missing = subprocess.run([*command, str(tmp_path / "none")], env=env, capture_output=True, text=True)
    assert missing.returncode == 2 and "No such file" in missing.stderr
