"""Writes the tokens of a text in the format of the Pile, and the difficulties of its samples, with DeepSpeed.

    python analyse.py --model bert
"""

import functools
import os
import sys

import numpy
import torch
from torch.nn.utils.rnn import pad_sequence

import pile_parts
from deepspeed.runtime.data_pipeline.data_sampling.data_analyzer import DataAnalyzer
from deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset import MMapIndexedDataset, MMapIndexedDatasetBuilder


def main(argv=None):
    """Writes ``tokens`` into the folder ``--out``, and the metrics into a folder with the name of the model."""
    workers = {"--workers": dict(type=int, default=2, help="processes of the analysis")}
    args = pile_parts.get_argument_parser(__doc__, workers).parse_args(argv)
    if args.workers < 1:
        sys.exit(f"--workers {args.workers} must be 1 or more")
    words, tokens, samples = pile_parts.read_data(args)
    folder, path = os.path.join(args.out, args.model), os.path.join(args.out, "tokens")
    os.makedirs(folder, exist_ok=True)
    words.save(f"{path}.json")
    with MMapIndexedDatasetBuilder(f"{path}.bin", dtype=numpy.uint16) as builder:
        for paragraph in pile_parts.paragraphs_of(words, tokens):
            builder.add_item(paragraph)
            builder.end_document()
        builder.finalize(f"{path}.idx")

    analyzer = functools.partial(
        DataAnalyzer,
        samples.texts,
        num_threads=args.workers,
        num_threads_reduce=args.workers,
        batch_size=64,
        save_path=folder,
        collate_fn=functools.partial(pad_sequence, batch_first=True, padding_value=words.pad),
    )
    analyzer(
        metric_names=["counts"],
        metric_functions=[lambda ids: torch.bincount(ids[ids != words.pad], minlength=len(words))],
        metric_types=["accumulate_value_over_samples"],
        metric_dtypes=[torch.int64],
    ).run_map_reduce()
    counts = torch.tensor(MMapIndexedDataset(os.path.join(folder, "counts", "counts_metric_value"))[0])
    rarity = (-100 * (counts.clamp(min=1).double() / counts.sum()).log()).round().long()
    rarity[words.pad] = 0
    metrics = {"vocabularyrarity": lambda ids: rarity[ids].sum(1), "seqlen": lambda ids: (ids != words.pad).sum(1) + 3}
    if args.model == "gpt":
        del metrics["seqlen"]  # all samples have the same length
    analyzer(
        metric_names=list(metrics),
        metric_functions=list(metrics.values()),
        metric_types=["single_value_per_sample"] * len(metrics),
        metric_dtypes=[torch.int64] * len(metrics),
    ).run_map_reduce()
    print(f"{folder}: {len(samples)} samples, {len(tokens)} tokens, metrics {', '.join(metrics)}")


if __name__ == "__main__":
    main()
