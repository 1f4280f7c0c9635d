"""Consolidates a ZeRO checkpoint into weights of a chosen dtype: ``python -m deepspeed.utils.zero_to_torch``."""

import argparse
import sys

from deepspeed.host.command_line import program
from deepspeed.utils.zero_to_fp32 import NAMES_OF_DTYPES, add_arguments, convert_zero_checkpoint_to_state_dict


@program("zero_to_torch")
def main(args=None):
    """Exit code: 0, or 1 with what is wrong."""
    parser = add_arguments(argparse.ArgumentParser(prog="zero_to_torch", description=__doc__))
    dtypes = {name: dtype for dtype, name in NAMES_OF_DTYPES.items()}
    parser.add_argument("--dtype", choices=sorted(dtypes), default="fp32", help="of the weights (default fp32)")
    args = parser.parse_args(args)
    convert_zero_checkpoint_to_state_dict(
        args.checkpoint_dir,
        args.output_dir,
        dtypes[args.dtype],
        max_shard_size=args.max_shard_size,
        safe_serialization=args.safe_serialization,
        tag=args.tag,
        exclude_frozen_parameters=args.exclude_frozen_parameters,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
