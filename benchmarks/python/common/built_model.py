"""The command line of benchmarks that build a GPT of about 400 million parameters on several ranks."""

import argparse

OPTIONS = ("ranks", "layers", "width", "plain")  # that the ranks are given


def parse_arguments(doc, without):
    """``doc``: of the benchmark; ``without``: what ``--plain`` does without."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1664)
    parser.add_argument("--plain", action="store_true", help=f"without {without}")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()
