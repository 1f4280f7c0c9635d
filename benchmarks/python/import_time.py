"""The cost of `import deepspeed` above `import torch`.

    python benchmarks/python/import_time.py [--python PATH] [--runs 9] [--json FILE]

Each run is a fresh process that imports torch, then deepspeed, with an empty PATH. Exit code 1 when the best run needs
more than --limit_ms, or when the import opened a CUDA context. The package loads what a name needs when the name is
first used; what the first look at ``deepspeed.initialize`` costs is given as well.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from common import machine  # noqa: E402  (the line above finds it from any directory)

PROBE = """
import json, time
start = time.perf_counter()
import torch
middle = time.perf_counter()
import deepspeed
end = time.perf_counter()
deepspeed.initialize
used = time.perf_counter()
print(json.dumps({
    "torch_ms": (middle - start) * 1e3,
    "deepspeed_ms": (end - middle) * 1e3,
    "first_use_ms": (used - end) * 1e3,
    "cuda_context": torch.cuda.is_initialized(),
    "version": deepspeed.__version__,
    "torch": torch.__version__,
}))
"""


def measure(python, runs):
    """A list of what PROBE printed, one entry for each run; the first, which warms the disk cache, is dropped."""
    env = dict(os.environ, PATH="")
    results = []
    for _ in range(runs + 1):
        out = subprocess.run([python, "-c", PROBE], env=env, capture_output=True, text=True)
        if out.returncode:
            sys.exit(f"import failed with an empty PATH:\n{out.stderr}")
        results.append(json.loads(out.stdout.splitlines()[-1]))
    return results[1:]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--limit_ms", type=float, default=100)
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    results = measure(args.python, args.runs)
    ours = [r["deepspeed_ms"] for r in results]
    figures = {
        "deepspeed_ms": {"median": statistics.median(ours), "min": min(ours), "max": max(ours)},
        "first_use_ms": {"median": statistics.median(r["first_use_ms"] for r in results)},
        "torch_ms": {"median": statistics.median(r["torch_ms"] for r in results)},
        "cuda_context": any(r["cuda_context"] for r in results),
        "limit_ms": args.limit_ms,
    }
    context = "yes" if figures["cuda_context"] else "no"
    print(
        f"import deepspeed {results[0]['version']} after torch {results[0]['torch']}: "
        f"{statistics.median(ours):.1f} ms median, {min(ours):.1f} best of {len(ours)} "
        f"(then deepspeed.initialize {figures['first_use_ms']['median']:.0f} ms; torch itself "
        f"{figures['torch_ms']['median']:.0f} ms); CUDA context: {context}; PATH empty"
    )
    machine.write_json(args.json, "import_time", figures, torch=results[0]["torch"])
    sys.exit(min(ours) > args.limit_ms or figures["cuda_context"])


if __name__ == "__main__":
    main()
