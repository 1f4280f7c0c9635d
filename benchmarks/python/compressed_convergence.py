"""The loss of ZeRO++ and of optimizers whose ranks exchange signs, beside AdamW's and LAMB's, on a small GPT.

    python benchmarks/python/compressed_convergence.py [--steps 2000] [--seeds 3] [--ranks 4] [--width 128]

Prints a line for each optimizer: the mean over seeds of the loss of the last tenth of the steps, the ratio to the plain
optimizer, and the bytes that a rank has sent for each element and step. It takes an hour on two cores.
"""

import argparse
import os
import statistics
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path[:0] = [os.path.join(ROOT, "python"), os.path.join(ROOT, "tests", "dist"), os.path.join(ROOT, "tests")]

from harness import run_ranks  # noqa: E402
from compressed_gpt import optimizers, train  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--only", nargs="*")
    given = parser.parse_args()
    plain = {}
    for kind in given.only or optimizers(given.steps, 1.0):
        found = []
        for seed in range(given.seeds):
            ranks = run_ranks(given.ranks, train, kind, given.steps, seed, given.width, timeout=3600)
            found.append((statistics.fmean(loss for loss, _ in ranks), ranks[0][1]))
        loss = statistics.fmean(one for one, _ in found)
        base = plain.setdefault("Lamb" if "Lamb" in kind else "AdamW", loss)
        print(f"{kind:16} loss {loss:.4f}  ratio {loss / base:.4f}  {found[0][1]:.3f} bytes per element", flush=True)


if __name__ == "__main__":
    main()
