"""A page of charts about a run, from the file of its step log: ``python -m deepspeed.profiling.report RUN.jsonl``.

The page is one HTML file with its charts inside and no link to another file. Lines of the step log that cannot be read,
such as the last one of a process that was killed, are counted and left out, and so are values that are missing. With
``--plan PLAN.json``, the output of ``ds_plan --json``, the page has the plan beside the run.
"""

import argparse
import collections
import html
import json
import math
import os
import statistics
import sys
import time

from deepspeed.host.command_line import check_output, program
from deepspeed.profiling.phases import PHASES

POINTS = 600  # of a line of a chart; of a longer run each point is the mean of several steps
WIDTH, HEIGHT, LEFT, BOTTOM = 720, 190, 70, 20
COLORS = "#4477aa #ee6677 #228833 #ccbb44 #66ccee #aa3377 #bbbbbb #ee8866 #44bb99".split()
OWNERS = "parameters gradients masters states gathered wire".split()
# Phases of a plan -> those of the step log.
_PLANNED = {
    "forward": ("forward",),
    "backward": ("backward",),
    "step": ("optimizer", "offload"),
    "communication": ("communication", "gathers"),
}
STYLE = """body { font: 14px sans-serif; max-width: 760px; margin: 2em auto; }
h2 { font-size: 16px; margin: 1.5em 0 .3em; }
table { border-collapse: collapse; } td, th { padding: .1em .8em .1em 0; text-align: left; vertical-align: top; }
svg { display: block; } svg text { font: 11px sans-serif; } td { overflow-wrap: anywhere; }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 .9em; }"""


class Run:
    """The lines of a step log: ``head`` (the run), ``steps`` and ``ranks``, each in the order of steps. After a resume
    from an earlier step the lines of the later ones are those of the resumed run."""

    def __init__(self, path):
        self.head, self.steps, self.ranks, self.unread = {}, [], [], 0
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in filter(str.strip, file):
                self.unread += not self._take(line)

    def _take(self, line):
        try:
            found = json.loads(line)
        except ValueError:
            return False
        kind = found.get("kind") if isinstance(found, dict) else None
        if kind == "run":
            self.head = {**found, "start": self.head.get("start", found.get("start"))}
            return True
        rows = {"step": self.steps, "ranks": self.ranks}.get(kind)
        if rows is None or number(found.get("step")) is None:
            return False
        while rows and rows[-1]["step"] >= found["step"]:
            rows.pop()
        rows.append(found)
        return True

    def values(self, *path):
        """The number of each step below these keys, or None."""
        return [within(step, *path) for step in self.steps]


def number(value):
    """``value`` where it is a finite number, else None."""
    return value if type(value) in (int, float) and math.isfinite(value) else None


def within(found, *path):
    for key in path:
        found = found.get(key) if isinstance(found, dict) else None
    return number(found)


def mean(values):
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def rate(values, walls):
    """The rate of several steps: the sum of their amounts over the sum of their seconds."""
    known = [(value, wall) for value, wall in zip(values, walls) if value is not None and wall]
    return sum(value * wall for value, wall in known) / sum(wall for _, wall in known) if known else None


def thin(values, combine=mean):
    """At most ``POINTS`` values: each is several of the given ones, combined, where there are more."""
    size = max(1, math.ceil(len(values) / POINTS))
    return [combine(values[first : first + size]) for first in range(0, len(values), size)]


def text(value):
    return f"{value:.4g}" if type(value) in (int, float) else html.escape(str(value))


def table(rows, head=()):
    lines = ["".join(f"<th>{text(cell)}</th>" for cell in head)] if head else []
    lines += ["".join(f"<td>{text(cell)}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def path_of(points):
    """The line through the points, which are None where there is a gap."""
    parts, drawn = [], False
    for point in points:
        if point is not None:
            parts.append(f"{'L' if drawn else 'M'}{point[0]:.1f},{point[1]:.1f}" + ("" if drawn else "h.1"))
        drawn = point is not None
    return "".join(parts)


def chart(title, steps, named, unit="", stacked=False, marks=(), walls=None):
    """A heading and the chart of ``named``: {name: a value or None for each of ``steps``}; nothing where there are no
    values. stacked: areas, one above the other. marks: steps with a line upwards. walls: the seconds of the steps,
    where the values are rates."""
    named = {name: values for name, values in named.items() if any(value is not None for value in values)}
    if walls is not None:
        named = {name: thin(list(zip(values, walls)), lambda some: rate(*zip(*some))) for name, values in named.items()}
    named = {name: thin(values) for name, values in named.items()}
    if not named:
        return ""
    steps = thin(steps, lambda some: some[-1])
    lower, upper, areas = [0.0] * len(steps), [0.0] * len(steps), []
    for values in named.values():
        upper = [low + (value or 0.0) for low, value in zip(lower, values)] if stacked else values
        areas.append((lower, upper))
        lower = upper if stacked else lower
    known = [value for _, upper in areas for value in upper if value is not None]
    least, most = 0.0 if stacked else min(known), max(known)
    tall, wide = (most - least) or abs(most) or 1.0, (steps[-1] - steps[0]) or 1
    high = HEIGHT - BOTTOM

    def x_of(step):
        return LEFT + (WIDTH - LEFT - 5) * (step - steps[0]) / wide

    def points(values):
        return [
            None if v is None else (x_of(s), high - (high - 10) * (v - least) / tall) for s, v in zip(steps, values)
        ]

    shapes = [f'<path d="M{x_of(step):.1f},10V{high}" stroke="#c33" stroke-opacity=".5"/>' for step in thin(marks, max)]
    for color, name, (lower, upper) in zip(COLORS, named, areas):
        line, fill = path_of(points(upper)), "none"
        if stacked:
            line, fill = path_of(points(upper) + points(lower)[::-1]) + "Z", color
        shapes.append(f'<path d="{line}" fill="{fill}" stroke="{color}" stroke-width="1.5" stroke-linecap="round">')
        shapes.append(f"<title>{text(name)}</title></path>")
    for value in (least, least + tall / 2, least + tall):
        shapes.append(f'<text x="0" y="{high - (high - 10) * (value - least) / tall + 4:.1f}">{text(value)}</text>')
    ends = f'<text x="{LEFT}" y="{HEIGHT - 4}">{steps[0]}</text>'
    ends += f'<text x="{WIDTH - 5}" y="{HEIGHT - 4}" text-anchor="end">step {steps[-1]}</text>'
    frame = f'<path d="M{LEFT},10V{high}H{WIDTH}" fill="none" stroke="#999"/>'
    keys = [f'<span class="key" style="background:{c}"></span>{text(name)}' for c, name in zip(COLORS, named)]
    return (
        f"<h2>{text(title)}{f', {unit}' if unit else ''}</h2>"
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{frame}{"".join(shapes)}{ends}</svg>'
        f"<p>{''.join(keys) if len(keys) > 1 or stacked else ''}</p>"
    )


def slowest_ranks(run):
    """A table of the ranks for which the others have waited, the worst first."""
    found = collections.defaultdict(list)
    for one in run.ranks:
        phase = one.get("slowest_phase")
        high, low = within(one, "max", phase), within(one, "min", phase)
        gap = None if high is None or low is None else high - low
        found[one.get("slowest_rank"), one.get("host", ""), phase].append(gap)
    rows = [(*who, len(gaps), mean(gaps)) for who, gaps in found.items()]
    rows.sort(key=lambda row: -row[3] * (row[4] or 0.0))
    head = ("rank", "host", "phase", "times", "seconds behind the fastest, mean")
    return "<h2>Slowest ranks</h2>" + table([[r if r is not None else "?" for r in row] for row in rows[:20]], head)


def beside_plan(run, plan):
    """``[(phase, planned seconds, measured seconds)]``. ``plan``: the values that ``ds_plan --json`` prints. Measured
    ones are medians of the steps, without the first tenth."""
    steps = run.steps[len(run.steps) // 10 :]
    planned = max(plan["ranks"], key=lambda rank: rank["peak_bytes"])["seconds"]

    def measured(*paths):
        sums = (sum(within(one, *path) or 0.0 for path in paths) for one in steps)
        return statistics.median(sums) if steps else None

    rows = [
        (phase, planned.get(phase, 0.0), measured(*(("phases", name) for name in names)))
        for phase, names in _PLANNED.items()
    ]
    return [*rows, ("whole step", plan["seconds"], measured(("wall",)))]


def page(run, plan=None):
    """The page of a run, and of its plan."""
    steps, skipped = [one["step"] for one in run.steps], [one["step"] for one in run.steps if one.get("skipped")]
    wall = run.values("wall")
    phases = {phase: run.values("phases", phase) for phase in PHASES}
    spent = {phase: sum(filter(None, values)) for phase, values in phases.items()}
    whole = sum(spent.values()) or 1.0
    start, hosts = number(run.head.get("start")), sorted(set(map(str, run.head.get("ranks") or ())))
    peaks = [value / 2**30 for value in run.values("memory", "peak") if value is not None]
    facts = [
        ("began", "" if start is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(start))),
        ("ranks", run.head.get("world_size", "?")),
        ("hosts", ", ".join(hosts)),
        ("steps", f"{len(steps)} ({steps[0]} to {steps[-1]})" if steps else "none"),
        ("seconds of steps", sum(filter(None, wall))),
        ("seconds of a step, mean", mean(wall)),
        ("samples per second, mean", rate(run.values("samples_per_sec"), wall)),
        ("tokens per second, mean", rate(run.values("tokens_per_sec"), wall)),
        ("share of peak flops (MFU), mean", rate(run.values("mfu"), wall)),
        ("peak of memory, GiB", max(peaks, default=None)),
        ("skipped steps", f"{len(skipped)}: {', '.join(map(str, skipped[:40]))}{' ...' * (len(skipped) > 40)}"),
        ("lines that cannot be read", run.unread or None),
    ]
    memory = {owner: run.values("memory", owner) for owner in OWNERS}
    in_gib = {name: [None if v is None else v / 2**30 for v in values] for name, values in memory.items()}
    shares = {f"{phase} {spent[phase] / whole:.1%}": values for phase, values in phases.items()}
    parts = [
        table([fact for fact in facts if fact[1] is not None]),
        _plan_table(run, plan, peaks) if plan else "",
        chart("Loss", steps, {"loss": run.values("loss")}, marks=skipped),
        chart("Learning rate", steps, {"lr": run.values("lr")}),
        chart("Gradient norm", steps, {"norm": run.values("grad_norm")}, marks=skipped),
        chart("Loss scale", steps, {"scale": run.values("loss_scale")}, marks=skipped),
        chart("Throughput", steps, {"samples": run.values("samples_per_sec")}, "samples per second", walls=wall),
        chart("Phases of a step", steps, shares, "seconds", stacked=True),
        chart("Memory by owner", steps, in_gib, "GiB", stacked=True),
        slowest_ranks(run),
        "<h2>Configuration that is not the default</h2>",
        table(sorted((run.head.get("config_changed") or {}).items())),
    ]
    title = "Training report"
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head><body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def _plan_table(run, plan, peaks):
    rows = [(f"{phase}, seconds", *both) for phase, *both in beside_plan(run, plan)]
    rows.append(("peak of memory, GiB", plan["peak_bytes"] / 2**30, max(peaks, default=None)))
    rows.append(("share of peak flops (MFU)", plan["mfu"], rate(run.values("mfu"), run.values("wall"))))
    shown = [["-" if cell is None else cell for cell in row] for row in rows]
    return "<h2>Plan and run</h2>" + table(shown, ("", "planned", "measured"))


def read_plan(path):
    """The values of a file that holds the output of ``ds_plan --json``. ValueError for another file."""
    with open(path, encoding="utf-8") as file:
        try:
            found = json.load(file)
        except ValueError:
            found = None
    if not isinstance(found, dict) or not {"ranks", "seconds", "peak_bytes", "mfu"} <= found.keys():
        raise ValueError(f"{path} is not a plan: write the output of ds_plan --json to it")
    return found


def write_report(jsonl, path, plan=None):
    """Writes the page about the run whose step log is the file ``jsonl``. ``plan``: a file of ``ds_plan --json``."""
    made = page(Run(jsonl), plan and read_plan(plan))
    if folder := os.path.dirname(path):
        os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(made)


@program("python -m deepspeed.profiling.report", code=2)
def main(argv=None):
    parser = argparse.ArgumentParser(prog="python -m deepspeed.profiling.report", description="A page about a run.")
    parser.add_argument("jsonl", metavar="RUN.jsonl", help="the file that step_log.file names")
    parser.add_argument("-o", "--output", help="the page; RUN.html where it is not given")
    parser.add_argument("--plan", metavar="PLAN.json", help="the output of ds_plan --json, shown beside the run")
    given = parser.parse_args(argv)
    path = given.output or os.path.splitext(given.jsonl)[0] + ".html"
    check_output(path, "--output")
    write_report(given.jsonl, path, given.plan)
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
