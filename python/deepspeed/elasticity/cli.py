"""``ds_elastic``: prints the batch and the numbers of ranks that the section ``elasticity`` of a file allows."""

import argparse
import json
import sys

from deepspeed.config.read import read
from deepspeed.elasticity.elasticity import compute_elastic_config
from deepspeed.host.command_line import program
from deepspeed.version import __version__


def parse_args(args=None):
    """The options as a namespace."""
    parser = argparse.ArgumentParser(
        prog="ds_elastic", description="Shows the batch size of an elastic job and the numbers of ranks that share it."
    )
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="DeepSpeed configuration")
    parser.add_argument("-w", "--world-size", type=int, default=0, metavar="N", help="ranks, to see their micro batch")
    return parser.parse_args(args)


@program("ds_elastic: error")
def main(args=None):
    """Exit code: 0, or 1 with what is wrong."""
    options = parse_args(args)
    config = read(options.config).raw()
    found = compute_elastic_config(config, __version__, world_size=options.world_size)
    rule = "-" * 42
    print(rule, "Elasticity config:", rule, json.dumps(config["elasticity"], indent=4, sort_keys=True), rule, sep="\n")
    print("Calculated results:", rule, f"final_batch_size .... {found[0]}", sep="\n")
    print(f"valid_gpus .......... {found[1]}")
    if options.world_size > 0:
        micro = found[2]
        copies = options.world_size // config["elasticity"].get("model_parallel_size", 1)  # of the model
        accumulation = found[0] // (micro * copies)
        print(f"micro_batch_size .... {micro}", f"accumulation steps .. {accumulation}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
