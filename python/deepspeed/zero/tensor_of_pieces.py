"""A one-dimensional tensor that lies in memory in several pieces: who writes it down need not put it together."""

import torch


class TensorOfPieces:
    """``numel`` elements of ``dtype``; ``parts``: (where it begins, one-dimensional tensor of that dtype), ascending
    and without overlap. What no part covers is zero."""

    def __init__(self, numel, dtype, parts):
        self.numel, self.dtype = numel, dtype
        self.parts = []
        at = 0
        for begin, tensor in parts:
            self._gap(begin - at, tensor.device)
            self.parts.append(tensor)
            at = begin + tensor.numel()
        self._gap(numel - at, "cpu")

    def _gap(self, numel, device):
        if numel > 0:
            self.parts.append(torch.zeros(numel, dtype=self.dtype, device=device))

    def whole(self):
        """The tensor in one piece, in memory of its own, on the CPU."""
        made = torch.empty(self.numel, dtype=self.dtype)
        at = 0
        for part in self.parts:
            made[at : at + part.numel()] = part
            at += part.numel()
        return made
