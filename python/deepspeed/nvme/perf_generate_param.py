"""``ds_nvme_tune``, second part: prints the best measured setting as the section ``aio`` of a configuration."""

import json
import math
from pathlib import Path


def results_in(log_dir):
    """The results that ``sweep_main`` has logged, fastest first."""
    found = [json.loads(path.read_text("utf-8")) for path in sorted(Path(log_dir).glob("*.json"))]
    return sorted(found, key=lambda result: -result["gb_per_s"])


def best_section(results):
    """One setting for reads and writes: that with the largest product of its shares of the best read and write rate."""
    best = {op: max(r["gb_per_s"] for r in results if r["op"] == op) for op in {r["op"] for r in results}}
    shares = {}
    for result in results:
        key = json.dumps(result["aio"], sort_keys=True)
        share = shares.setdefault(key, {op: 0.0 for op in best})
        share[result["op"]] = max(share[result["op"]], result["gb_per_s"] / max(best[result["op"]], 1e-9))
    return json.loads(max(shares, key=lambda key: math.prod(shares[key].values())))


def generate_main(log_dir):
    """Prints the best read and write of the logs in ``log_dir`` in GB/s, then the section; returns the section's dict.

    Raises:
        ValueError: there are no logs.
    """
    results = results_in(log_dir)
    if not results:
        raise ValueError(f"there is nothing measured in {log_dir}: run ds_nvme_tune with it as --log_dir first")
    for operation in ("read", "write"):
        best = next((result for result in results if result["op"] == operation), None)
        if best is not None:
            print(f"best {operation}: {best['gb_per_s']:.3f} GB/s with {json.dumps(best['aio'])}")
    section = {"aio": best_section(results)}
    print(json.dumps(section, indent=2))
    return section
