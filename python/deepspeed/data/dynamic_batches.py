"""Dynamic batches: the section ``data_efficiency.data_sampling.dynamic_batching`` of an engine's configuration."""

import os

import numpy
import torch

from deepspeed import comm as dist
from deepspeed.comm.agreement import together
from deepspeed.data.analysis_parts import metric_file, metric_folder
from deepspeed.data.indexed import IndexedDataset, index_file_path
from deepspeed.data.token_batches import TokenBatches
from deepspeed.log import log_dist

_AT = "data_efficiency.data_sampling.dynamic_batching"
_CHUNK = 256  # samples that batch_seqlens_fn measures at once
LENGTHS_FILE = "seqlens.npy"
METRIC = "seqlen"  # the metric of an analysis that has the lengths


def get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed(
    dataset,
    engine,
    dataset_seqlens=None,
    dataset_filter_ids=None,
    dataloader_collate_fn=None,
    sample_padding_fn=None,
    batch_seqlens_fn=None,
    loss_tokens=None,
):
    """Makes a loader of batches of at most ``max_tokens`` tokens, by the section ``dynamic_batching`` of ``engine``.
    Returns ``(loader, learning-rate schedule, arguments of engine.deepspeed_io)``. The engine uses the loader and the
    schedule from now on.

    The loss that the script gives to ``engine.backward`` is the mean over the tokens of its micro-batch. The engine
    weights it, so that a step is made with the mean over the tokens of all ranks and accumulation steps. The
    micro-batch that is trained on must be the one that the loader has handed out last.

    dataset: a map-style data set.
    dataset_seqlens: the tokens of each sample. Without it they are read from ``metrics_path``, which is the
        ``save_path`` of a ``DataAnalyzer`` with the metric "seqlen", the folder of one metric in it, or a folder with
        ``seqlens.npy``.
    batch_seqlens_fn: measures the lengths if they are not known otherwise. It gets a collated batch and returns the
        lengths of its samples. Each rank measures a share, and rank 0 writes the lengths to ``seqlens.npy`` in
        ``metrics_path``, if that key is set.
    dataset_filter_ids: the numbers of the samples that are used; None: all.
    dataloader_collate_fn: the ``collate_fn`` of the loader.
    sample_padding_fn: ``sample_padding_fn(sample, size)`` pads a sample to the length of the longest one of its
        micro-batch.
    loss_tokens: the number of tokens in the loss of each sample, if it differs from the length.

    The learning rate of a step is that of the engine's schedule times a factor, by ``lr_scaling_method``:
    ``samples / train_batch_size`` ("linear"), its square root ("sqrt") or 1 ("none"), where ``samples`` is the number
    of samples of the step, over all ranks.
    """
    if not engine._dynamic.enabled:
        raise ValueError(
            "dynamic batching is not enabled: set data_efficiency.enabled, data_efficiency.data_sampling.enabled and "
            f"{_AT}.enabled to true"
        )
    sampling, seed = engine.data_sampling_config(), engine.data_efficiency_config()["seed"]
    section = sampling["dynamic_batching"]
    if dataset_seqlens is None:
        collate = dataloader_collate_fn or engine.collate_fn
        origin, dataset_seqlens = _known_lengths(dataset, section["metrics_path"], batch_seqlens_fn, collate)
    else:
        origin = "dataset_seqlens"
    if len(dataset_seqlens) != len(dataset):
        raise ValueError(
            f"{origin} has lengths of {len(dataset_seqlens)} samples, and the data set has {len(dataset)}: the lengths "
            "belong to another data set"
        )
    batches = TokenBatches(
        dataset_seqlens,
        section["max_tokens"],
        samples=dataset_filter_ids,
        min_batch_size=section["min_batch_size"],
        max_batch_size=section["max_batch_size"],
        order=section["sequence_picking_order"],
        seed=seed,
        ranks=engine.dp_world_size,
        rank=engine.parallel.data_rank,
        steps=engine.gradient_accumulation_steps(),
        drop_last=engine.dataloader_drop_last(),
        loss_tokens=loss_tokens,
    )
    if section["verbose"]:
        _tell(batches)
    options = {
        "dataset": dataset,
        "batch_size": 1,  # each batch of the sampler is a micro-batch
        "pin_memory": sampling["pin_memory"],
        "data_sampler": batches,
        "collate_fn": dataloader_collate_fn,
        "num_local_io_workers": sampling["num_workers"],
    }
    if sample_padding_fn is not None:
        collate = dataloader_collate_fn or engine.collate_fn or torch.utils.data.default_collate
        options["dataset"] = _WithLengths(dataset, dataset_seqlens)
        options["collate_fn"] = _Padding(sample_padding_fn, collate)
    loader = engine.deepspeed_io(**options)
    engine._dynamic.use(loader, section["lr_scaling_method"])
    return loader, engine.lr_scheduler, options


def _tell(batches):
    made = batches.epoch_of(0)
    for number, (end, count, tokens) in enumerate(zip(made.ends, made.counts, made.tokens)):
        found = made.samples[end - count : end].tolist()
        log_dist(f"batch {number}: {tokens} tokens in {count} samples: {found}", ranks=[0])


def _analysed(folder):
    """The path of the lengths that a ``DataAnalyzer`` has written to ``folder``; None if there are none."""
    own = os.path.basename(os.path.abspath(folder))  # the name of the metric, if the folder is that of a metric
    for path in (
        metric_file(metric_folder(folder, METRIC), METRIC, "sample_to_metric"),
        metric_file(folder, own, "sample_to_metric"),
    ):
        if os.path.exists(index_file_path(path)):
            return path
    return None


def _lengths_of_analysis(path):
    found = IndexedDataset(path)
    if (found.sizes != 1).any():
        raise ValueError(
            f"{path} does not have exactly one value for sample {(found.sizes != 1).argmax()}: the type of its metric "
            "must be single_value_per_sample, and its values must be numbers of tokens"
        )
    return found.whole()


def _lengths_in(file):
    try:
        return numpy.load(file, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(
            f"{file} is damaged, or it is not a file of numpy. Remove it, so that the lengths are measured again: "
            f"{error}"
        ) from error


def _measured(dataset, numbers, measure, collate):
    """The lengths of the samples ``numbers``, by the function ``measure``."""
    found = []
    for first in range(0, len(numbers), _CHUNK):
        chunk = numbers[first : first + _CHUNK]
        lengths = [int(one) for one in measure(collate([dataset[int(number)] for number in chunk]))]
        if len(lengths) != len(chunk):
            raise ValueError(
                f"batch_seqlens_fn returned {len(lengths)} lengths for a batch of {len(chunk)} samples: it must return "
                "one for each"
            )
        found += lengths
    return found


def _known_lengths(dataset, folder, measure, collate):
    """Returns ``(where the lengths come from, the lengths)``."""
    file = None if folder is None else os.path.join(folder, LENGTHS_FILE)
    analysed = None if folder is None else _analysed(folder)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    there = [(analysed is not None, file is not None and os.path.exists(file))]
    if ranks > 1:  # the folder may be on the drive of one host, and all ranks must take the same branch
        own, there = there[0], [None] * ranks
        dist.all_gather_object(there, own)

    def find():
        """Returns ``(source, all lengths)``, or ``(None, lengths of this rank's share)`` if it has measured them."""
        if all(analyses for analyses, _ in there):
            return analysed, _lengths_of_analysis(analysed)
        if all(files for _, files in there):
            return file, _lengths_in(file)
        if measure is None:
            raise ValueError(
                "the lengths of the samples are not known: pass dataset_seqlens, or batch_seqlens_fn, which measures "
                "them"
                + ("" if file is None else f" ({folder} has neither {LENGTHS_FILE} nor an analysis of '{METRIC}')")
            )
        share = numpy.array_split(numpy.arange(len(dataset)), ranks)[rank]
        return None, _measured(dataset, share, measure, collate or torch.utils.data.default_collate)

    source, found = together(find, "finding the lengths of the samples", alone=ranks == 1)
    if source is not None:
        return source, found
    parts = [found]
    if ranks > 1:
        parts = [None] * ranks
        dist.all_gather_object(parts, found)
    lengths = numpy.asarray([one for part in parts for one in part])
    if file is not None and rank == 0:
        os.makedirs(folder, exist_ok=True)
        numpy.save(f"{file}.tmp.npy", lengths)
        os.replace(f"{file}.tmp.npy", file)
    return "batch_seqlens_fn", lengths


class _WithLengths(torch.utils.data.Dataset):
    def __init__(self, dataset, lengths):
        self.dataset, self.lengths = dataset, lengths

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, number):
        return int(self.lengths[number]), self.dataset[number]


class _Padding:
    def __init__(self, pad, collate):
        self.pad, self.collate = pad, collate

    def __call__(self, pairs):
        longest = max(length for length, _ in pairs)
        return self.collate([self.pad(sample, longest) for _, sample in pairs])
