"""Command-line arguments that every DeepSpeed script understands."""

import argparse


def add_config_arguments(parser):
    """Adds ``--deepspeed`` and ``--deepspeed_config FILE`` to an argparse parser and returns it."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configuration")
    group.add_argument(
        "--deepspeed", default=False, action="store_true", help="train with DeepSpeed (for scripts that can do without)"
    )
    group.add_argument("--deepspeed_config", default=None, type=str, help="DeepSpeed configuration file (JSON)")
    # Spellings of the first releases; they reach initialize() under the new names.
    group.add_argument("--deepscale", default=False, action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", default=None, type=str, help=argparse.SUPPRESS)
    return parser
