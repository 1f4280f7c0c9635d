"""Joins the JSON files of one benchmark run into benchmarks/results/<date>-<host kind>.{json,md}.

    python collect.py FOLDER_OF_JSON RESULTS_FOLDER

Two kinds of file are read: Google Benchmark's (``context`` and ``benchmarks``) and our own (``name``, ``machine``,
``figures``; see machine.write_json).
"""

import datetime
import glob
import json
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
from common import machine  # noqa: E402  (the line above finds it from any directory)


def read(folder):
    parts = {}
    for path in sorted(glob.glob(os.path.join(folder, "*.json"))):
        with open(path, encoding="utf-8") as file:
            parts[os.path.splitext(os.path.basename(path))[0]] = json.load(file)
    return parts


def rate(entry):
    """Figures of a Google Benchmark entry besides its time: bytes and items per second and its own counters."""
    texts = []
    if "bytes_per_second" in entry:
        texts.append(f"{entry['bytes_per_second'] / 1e9:.2f} GB/s")
    if "items_per_second" in entry:
        texts.append(f"{entry['items_per_second'] / 1e6:.1f} M/s")
    known = (
        "name",
        "family_index",
        "per_family_instance_index",
        "run_name",
        "run_type",
        "repetitions",
        "repetition_index",
        "threads",
        "iterations",
        "real_time",
        "cpu_time",
        "time_unit",
        "bytes_per_second",
        "items_per_second",
        "label",
        "aggregate_name",
        "aggregate_unit",
        "error_occurred",
        "error_message",
    )
    texts += [
        f"{key} {value:.4g}" for key, value in entry.items() if key not in known and isinstance(value, (int, float))
    ]
    if entry.get("label"):
        texts.append(entry["label"])
    if entry.get("error_message"):
        texts.append("FAILED: " + entry["error_message"])
    return ", ".join(texts)


def flatten(prefix, value):
    """(dotted key, number or text) of nested figures."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from flatten(f"{prefix}.{key}" if prefix else str(key), inner)
    elif isinstance(value, (list, tuple)):
        for index, inner in enumerate(value):
            yield from flatten(f"{prefix}[{index}]", inner)
    else:
        yield prefix, f"{value:.5g}" if isinstance(value, float) else str(value)


def markdown(about, parts):
    lines = [f"# Benchmarks, {about['date']}", "", "| machine | |", "|---|---|"]
    lines += [
        f"| {key} | {', '.join(map(str, value)) if isinstance(value, list) else value} |"
        for key, value in about.items()
    ]
    for name, part in parts.items():
        lines += ["", f"## {name}", ""]
        if "benchmarks" in part:
            lines += ["| case | time | |", "|---|---|---|"]
            for entry in part["benchmarks"]:
                time = f"{entry.get('real_time', 0):.4g} {entry.get('time_unit', '')}"
                lines.append(f"| {entry['name']} | {time} | {rate(entry)} |")
        else:
            extra = {key: value for key, value in part.get("machine", {}).items() if key not in about}
            if extra:
                lines += [", ".join(f"{key}: {value}" for key, value in extra.items()), ""]
            lines += ["| figure | value |", "|---|---|"]
            lines += [f"| {key} | {value} |" for key, value in flatten("", part.get("figures", part))]
    return "\n".join(lines) + "\n"


def main():
    folder, results = sys.argv[1:3]
    parts = read(folder)
    if not parts:
        sys.exit("no benchmark ran")
    about = machine.describe()
    about["commit"] = machine.commit(os.path.dirname(os.path.abspath(__file__)))
    os.makedirs(results, exist_ok=True)
    stem = os.path.join(
        results,
        f"{datetime.date.today().isoformat()}-{machine.host_kind()}-torch{(about['torch'] or 'none').split('+')[0]}",
    )
    with open(stem + ".json", "w", encoding="utf-8") as file:
        json.dump({"machine": about, "results": parts}, file, indent=1)
        file.write("\n")
    with open(stem + ".md", "w", encoding="utf-8") as file:
        file.write(markdown(about, parts))
    print(f"written: {stem}.json and {stem}.md")


if __name__ == "__main__":
    main()
