"""Batches of samples of different lengths with a limit on their tokens, and their distribution over ranks."""

import collections

import numpy
import torch

from deepspeed.log import logger

ORDERS = ("random", "seqlen", "dataloader")
Epoch = collections.namedtuple("Epoch", "samples ends counts tokens loss_tokens")  # see ``TokenBatches.epoch_of``
Window = collections.namedtuple("Window", "epoch start first")  # the first of the micro-batches of a step on each rank


class TokenBatches:
    """A sampler of whole batches for a ``ResumableDataLoader`` with ``batch_size`` 1.

    The micro-batches of an epoch are a function of the lengths, the settings, the seed and the number of the epoch.
    They are dealt to ``ranks`` in turns, and ``steps`` turns make a step of the optimizer. If the last ones do not make
    a whole step, micro-batches from the start of the epoch come again, or with ``drop_last`` the last ones are left
    out.

    lengths: the tokens of each sample of the data set.
    samples: the numbers of the samples that are used; None: all.
    min_batch_size: batches of fewer samples are left out, with a line in the log.
    order: "dataloader": the order of the data set; "seqlen": short samples first; "random": drawn anew for each epoch.
    loss_tokens: the number of tokens in the loss of each sample, if it differs from the length.
    """

    epoch = start = 0  # start: micro-batches of the epoch that were handed out before, on all ranks

    def __init__(
        self, lengths, max_tokens, samples=None, min_batch_size=1, max_batch_size=None, order="dataloader", seed=0,
        ranks=1, rank=0, steps=1, drop_last=False, loss_tokens=None,
    ):  # fmt: skip
        self._lengths = _lengths("the length", lengths)
        self._loss_tokens = self._lengths if loss_tokens is None else _lengths("the number of loss tokens", loss_tokens)
        if len(self._loss_tokens) != len(self._lengths):
            numbers = f"{len(self._loss_tokens)} numbers, and there are {len(self._lengths)} samples"
            raise ValueError(f"loss_tokens has {numbers}: it must have one number for each.")
        self._samples = numpy.arange(len(self._lengths)) if samples is None else _samples(samples, len(self._lengths))
        longest = self._samples[self._lengths[self._samples].argmax()]
        if self._lengths[longest] > max_tokens:
            raise ValueError(
                f"max_tokens is {max_tokens}, and sample {longest} has {self._lengths[longest]} tokens: raise "
                "max_tokens, shorten the sample, or leave it out of dataset_filter_ids."
            )
        if max_batch_size is not None and max_batch_size < min_batch_size:
            raise ValueError(f"min_batch_size {min_batch_size} is above max_batch_size {max_batch_size}: lower it.")
        if order not in ORDERS:
            raise ValueError(f"sequence_picking_order {order!r} is not one of {', '.join(ORDERS)}.")
        self.max_tokens, self._sizes = max_tokens, (min_batch_size, max_batch_size)
        self._order, self._seed, self._drop_last = order, seed, drop_last
        self.ranks, self.rank, self.steps = ranks, rank, steps
        self._epochs, self._deal, self._skip = {}, (None, None), 0
        batches = len(self.epoch_of(0).ends)
        if drop_last and batches < ranks * steps:
            raise ValueError(
                f"the data set has {batches} batches of at most {max_tokens} tokens, and a step of {ranks} ranks and "
                f"{steps} accumulation steps takes {ranks * steps}: set dataloader_drop_last to false, or lower "
                "max_tokens."
            )

    # ---- an epoch ----------------------------------------------------------------------------------------------------
    def epoch_of(self, number):
        """The ``Epoch``: its samples in order, and for each micro-batch its end in these samples and its numbers of
        samples, of tokens, and of tokens in the loss."""
        number = number if self._order == "random" else 0
        if number not in self._epochs:
            self._epochs = {key: kept for key, kept in self._epochs.items() if key == number - 1}
            self._epochs[number] = self._made(self._ordered(number))
        return self._epochs[number]

    def _ordered(self, number):
        if self._order == "seqlen":
            return self._samples[numpy.argsort(self._lengths[self._samples], kind="stable")]
        if self._order == "random":
            generator = torch.Generator().manual_seed(self._seed + number)
            return self._samples[torch.randperm(len(self._samples), generator=generator).numpy()]
        return self._samples

    def _made(self, samples):
        (fewest, most), totals, at, ends = self._sizes, numpy.cumsum(self._lengths[samples]), 0, []
        while at < len(samples):
            before = totals[at - 1] if at else 0
            end = int(numpy.searchsorted(totals, before + self.max_tokens, side="right"))
            at = end if most is None else min(end, at + most)
            ends.append(at)
        ends = numpy.asarray(ends)
        counts = numpy.diff(ends, prepend=0)
        tokens, in_loss = (
            numpy.add.reduceat(each[samples], ends - counts) for each in (self._lengths, self._loss_tokens)
        )
        wide = counts >= fewest
        if not wide.any():
            raise ValueError(
                f"no batch of at most {self.max_tokens} tokens has min_batch_size {fewest} samples: lower "
                "min_batch_size, or raise max_tokens."
            )
        if not wide.all():
            logger.warning(
                f"dynamic batches: {counts[~wide].sum()} samples of this epoch are left out, because their "
                f"{(~wide).sum()} batches have fewer samples than min_batch_size {fewest}"
            )
        return Epoch(samples, ends[wide], counts[wide], tokens[wide], in_loss[wide])

    def _dealt(self, epoch, start):
        """The numbers of the micro-batches, in the order in which they are dealt to the ranks."""
        if self._deal[0] != (epoch, start):
            total, at_once = len(self.epoch_of(epoch).ends), self.ranks * self.steps
            more = -((total - start) % at_once) if self._drop_last else -(total - start) % at_once
            self._deal = (epoch, start), numpy.arange(start, total + more) % total
        return self._deal[1]

    # ---- for the loader ----------------------------------------------------------------------------------------------
    def set_epoch(self, epoch):
        self.epoch = epoch

    def start_at(self, skip, order_state=None):
        """Iterations leave out ``skip`` batches from now on."""
        self._skip = skip

    def share_after(self, start):
        """The number of micro-batches of each rank in the whole steps after the first ``start`` ones of this epoch."""
        return len(self._dealt(self.epoch, start)) // self.ranks

    def __len__(self):
        return len(self._dealt(self.epoch, 0)) // self.ranks

    def __iter__(self):
        made = self.epoch_of(self.epoch)
        for number in self._dealt(self.epoch, self.start)[self.rank :: self.ranks][self._skip :]:
            end = made.ends[number]
            yield made.samples[end - made.counts[number] : end].tolist()

    # ---- for the engine ----------------------------------------------------------------------------------------------
    def following(self, window):
        """``window``, or the first one of the next epoch if ``window`` is behind the end of its epoch."""
        over = window.first * self.ranks >= len(self._dealt(window.epoch, window.start))
        return Window(window.epoch + 1, 0, 0) if over else window

    def _of_window(self, window, values):
        first = window.first * self.ranks
        return values[self._dealt(window.epoch, window.start)[first : first + self.ranks * self.steps]]

    def samples_in(self, window):
        """The number of samples of a step, over all ranks."""
        return int(self._of_window(window, self.epoch_of(window.epoch).counts).sum())

    def tokens_in(self, window, micro):
        """The number of tokens in a micro-batch of this rank."""
        tokens = self._of_window(window, self.epoch_of(window.epoch).tokens)
        return int(tokens[micro * self.ranks + self.rank])

    def weight(self, window, micro):
        """The factor for the loss of a micro-batch of this rank. With it the mean over the micro-batches of a step is
        the mean over its tokens."""
        tokens = self._of_window(window, self.epoch_of(window.epoch).loss_tokens)
        return float(tokens[micro * self.ranks + self.rank]) * len(tokens) / float(tokens.sum())


def _lengths(what, values):
    found = numpy.asarray(values)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu":
        raise ValueError(
            f"{what} of each sample must be a whole number, and there is an array of {found.dtype} of shape "
            f"{found.shape}."
        )
    if found.min() < 1:
        raise ValueError(f"{what} of sample {found.argmin()} is {found.min()}: it must be at least 1.")
    return found.astype(numpy.int64)


def _samples(numbers, total):
    found = numpy.asarray(numbers)
    if found.ndim != 1 or not len(found) or found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= total:
        raise ValueError(f"dataset_filter_ids must have numbers of samples, from 0 to {total - 1}, and at least one.")
    return found.astype(numpy.int64)
