"""Masks for the attention of a whole sequence, made from each rank's part: padding, packed documents, sliding windows.
Models make masks for the part that they see; these masks are checked, and replaced by masks for the whole."""

import functools

import torch

from deepspeed import comm as dist


def allowed_of(mask):
    """A boolean mask (True: look) from a boolean one or one that is added to scores; None stays None."""
    return mask if mask is None or mask.dtype == torch.bool else mask >= 0


def documents(positions):
    """Numbers of packed documents: a new one starts where ``positions`` (``[batch, sequence]``) do not go on by one."""
    starts = torch.zeros_like(positions)
    starts[:, 1:] = (positions[:, 1:] != positions[:, :-1] + 1).to(starts.dtype)
    return starts.cumsum(1)


def allowed(positions, kept, causal, window):
    """``[batch, 1, query, key]``, True where a query may look. ``kept``: ``[batch, sequence]``, False for padding."""
    whole = (0, positions.shape[1])
    return allowed_in(documents(positions), kept, causal, window, whole, whole)


def allowed_in(numbers, kept, causal, window, queries, keys):
    """``allowed`` of two runs of tokens ``(start, stop)``. ``numbers``: of documents."""
    position = torch.arange(numbers.shape[1], device=numbers.device)
    distance = position[slice(*queries), None] - position[None, slice(*keys)]
    found = torch.ones_like(distance, dtype=torch.bool)
    if causal:
        found = distance >= 0
    if window is not None:
        found = found & (distance.abs() < window if not causal else distance < window)
    found = found & (numbers[:, slice(*queries), None] == numbers[:, None, slice(*keys)])
    return (found & kept[:, None, slice(*keys)])[:, None]


class Whole:
    """Positions and padding of the whole sequence, which the ranks of ``group`` gather from their parts.

    ``mask``: what the model made for this rank's part, ``[batch, 1, part, part]`` or ``[batch, part]`` (padding), or
    None. ``positions``: of the part, ``[batch, part]``; None if the model gives none: then positions are
    consecutive.
    """

    def __init__(self, mask, positions, batch, length, group, device):
        world, rank = dist.get_world_size(group), dist.get_rank(group)
        self.made, self.checked = {}, {}
        part = allowed_of(mask)
        kept = torch.ones(batch, length, dtype=torch.bool, device=device)
        if part is not None and part.dim() == 4:
            kept = part.any(dim=2).any(dim=1).expand(batch, length)
        elif part is not None:
            kept = part.to(torch.bool).expand(batch, length)
        if positions is None:
            positions = torch.arange(rank * length, (rank + 1) * length, device=device)[None]
        positions = positions.to(torch.int64).expand(batch, length)
        own = torch.stack((positions, kept.to(torch.int64))).contiguous()
        every = [torch.empty_like(own) for _ in range(world)]
        dist.all_gather(every, own, group=group)
        self.own_positions, self.own_kept = positions, kept
        self.positions, kept = torch.cat(every, dim=2).unbind()
        self.kept = kept.to(torch.bool)
        self.padded = not bool(self.kept.all())
        self.documents = documents(self.positions)
        self.packed = not bool((self.documents == 0).all())

    def mask(self, causal, window, given):
        """For the whole sequence; None where being causal, or not, says all. ``given``: what the model made for this
        rank's part of it in the layer that asks; layers with and without a window have different ones."""
        kind = self._checked(causal, window, given)
        if kind is not None and kind not in self.made:
            self.made[kind] = allowed(self.positions, self.kept, *kind)
        return self.made.get(kind)

    def blocks(self, causal, window, given):
        """``mask`` as a function of two runs of tokens, so that it is never there as a whole."""
        kind = self._checked(causal, window, given)
        return None if kind is None else functools.partial(allowed_in, self.documents, self.kept, *kind)

    def _checked(self, causal, window, given):
        """``(causal, window)`` with None for a window that holds the whole sequence; None where that needs no mask."""
        window = None if window is None or window >= self.positions.shape[1] else window
        kind = causal, window
        if kind not in self.checked or self.checked[kind] is not given:
            self._check(allowed_of(given), causal, window)
            self.checked[kind] = given
        return kind if self.padded or self.packed or window is not None else None

    def _check(self, part, causal, window):
        """ValueError where the model made a mask for this rank's part that padding, documents and windows do not
        explain: it would be dropped."""
        if part is None or part.dim() != 4:
            return
        expected = allowed(self.own_positions, self.own_kept, causal, window)
        looks = self.own_kept[:, None, :, None]  # rows of padding are not checked
        if not torch.equal((expected & looks).expand_as(part & looks), part & looks):
            raise ValueError(
                "the model's attention mask is none of causal, bidirectional, padding, packed documents (position_ids "
                "that start again) and sliding windows: a mask of this kind cannot be made for a sequence that ranks "
                "share"
            )
