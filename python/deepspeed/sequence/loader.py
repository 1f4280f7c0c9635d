"""Batches of ranks that share sequences: each rank's loader gives whole sequences, all get their part of each."""

import copy

import torch

from deepspeed import comm as dist
from deepspeed.sequence.loss import IGNORED

_LENGTH_FROM = ("input_ids", "inputs_embeds", "position_ids")  # tensors that give the length of a batch


class UlyssesSPDataLoaderAdapter:
    """Iterates over ``dl`` so that the ranks of ``sp_group`` work on one sequence at a time: in each step all give a
    batch (a dict with ``position_ids``), and each batch in turn is cut along the sequence, a part for each rank. So
    there are ``sp_world_size`` times as many batches as in ``dl``.

    ``labels`` become ``shift_labels``: shifted before the cut, so that no label is lost at its edges. Tensors are cut
    where they are as long as the sequence, whatever their rank; others, masks that are as long in both of their last
    dimensions, and objects are passed on whole. Tensors are on ``device``. Lengths that do not divide are a ValueError
    on every rank; ``pad`` fills them up with tokens 0 without labels, which change no loss. Loaders that do not end
    together are a RuntimeError on every rank.
    """

    def __init__(self, dl, sp_rank, sp_group, sp_world_size, device, pad=False):
        self.dl, self.device, self.pad = dl, device, pad
        self.sp_rank, self.sp_group, self.sp_world_size = sp_rank, sp_group, sp_world_size
        self.iter, self.micro_batches, self.running = None, [], False

    def __getattr__(self, name):
        if name in ("dl", "__setstate__"):
            raise AttributeError(name)
        return getattr(self.dl, name)

    def __len__(self):
        return len(self.dl) * self.sp_world_size

    def __iter__(self):
        if self.running:
            return self
        epoch = copy.copy(self)
        epoch.iter, epoch.micro_batches, epoch.running = iter(self.dl), [], True
        return epoch

    def __next__(self):
        if not self.micro_batches:
            self.refill()
        return self.micro_batches.pop(0)

    def refill(self):
        """Takes a batch of every rank, and makes this rank's part of each."""
        if self.iter is None:
            self.iter = iter(self.dl)
        every = [None] * self.sp_world_size
        dist.all_gather_object(every, self._take(), group=self.sp_group)
        self._agree(every)
        self.micro_batches = [self._part(batch) for _, batch in every]

    def _take(self):
        """This rank's message to the others: ``("batch", batch)``, ``("end", None)`` or ``("error", text)``."""
        try:
            batch = next(self.iter)
            values = self._prepared(batch).items()
            return "batch", {name: v.detach().cpu() if torch.is_tensor(v) else v for name, v in values}
        except StopIteration:
            return "end", None
        except Exception as error:  # raised by every rank, below
            return "error", f"{type(error).__name__}: {error}"

    def _agree(self, every):
        ranks = {kind: [rank for rank, (found, _) in enumerate(every) if found == kind] for kind in ("error", "end")}
        if ranks["error"]:
            text = "; ".join(f"rank {rank}: {every[rank][1]}" for rank in ranks["error"])
            raise ValueError(f"no batch from the loaders of ranks that share sequences: {text}")
        if len(ranks["end"]) == len(every):
            raise StopIteration
        if ranks["end"]:
            raise RuntimeError(
                f"the loaders of ranks that share sequences do not end together: those of ranks {ranks['end']} of "
                f"{len(every)} have ended. Give all the same number of batches (drop_last=True, or a "
                "DistributedSampler)"
            )

    def _prepared(self, batch):
        if not hasattr(batch, "items"):
            raise TypeError(f"a batch is a {type(batch).__name__}: it must be a dict of tensors with position_ids")
        if batch.get("position_ids") is None:
            raise ValueError(
                "a batch without position_ids: a rank that has a part of a sequence cannot know where it stands. Add "
                "position_ids to the batch, for example torch.arange(length) for each row"
            )
        batch = dict(batch.items())
        labels = batch.pop("labels", None)
        if labels is not None:
            batch["shift_labels"] = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        length = _length(batch)
        more = -length % self.sp_world_size
        if more and not self.pad:
            rows = batch["position_ids"].shape[0]
            raise ValueError(
                f"a batch of {rows} sequences of {length} tokens cannot be cut into {self.sp_world_size} equal parts: "
                "pad it to a multiple, or pass pad=True to UlyssesSPDataLoaderAdapter"
            )
        return {name: _padded(name, value, length, more) for name, value in batch.items()} if more else batch

    def _part(self, batch):
        length = _length(batch)
        size, found = length // self.sp_world_size, {}
        for name, value in batch.items():
            dim = _dim_of_sequence(name, value, length)
            if dim is not None:
                value = value.narrow(dim, self.sp_rank * size, size)
            found[name] = value.to(self.device).contiguous() if torch.is_tensor(value) else value
        return found


def _length(batch):
    name = next(name for name in _LENGTH_FROM if batch.get(name) is not None)
    return batch[name].shape[-1 if name == "position_ids" else 1]


def _dim_of_sequence(name, value, length):
    """The dimension of ``value`` that is the sequence of ``length``; None if no dimension is, or the last two are."""
    if not torch.is_tensor(value) or value.dim() < 2:
        return None
    if name == "inputs_embeds":
        return 1  # also where features are as many as tokens
    if value.dim() > 2 and value.shape[-1] == value.shape[-2] == length:
        return None  # a mask of queries and keys
    if name == "position_ids":
        return value.dim() - 1 if value.shape[-1] == length else None
    return next((dim for dim in range(1, value.dim()) if value.shape[dim] == length), None)


def _padded(name, value, length, more):
    dims = [_dim_of_sequence(name, value, length)]
    if dims == [None]:
        if not (torch.is_tensor(value) and value.dim() > 2 and value.shape[-1] == value.shape[-2] == length):
            return value
        raise ValueError(f"'{name}' of shape {tuple(value.shape)} says who looks at whom: pad the batch before")
    shape = list(value.shape)
    shape[dims[0]] = more
    if name == "position_ids":  # the padding is a document of its own, with positions from 0
        filled = torch.arange(more, dtype=value.dtype, device=value.device).expand(shape)
    else:
        filled = value.new_full(shape, IGNORED if name == "shift_labels" else 0)
    return torch.cat((value, filled), dim=dims[0])
