"""A one-dimensional tensor that lies in memory in several pieces: who writes it down need not put it together."""

import torch


class TensorOfPieces:
    """``numel`` elements of ``dtype``; ``parts``: (where it begins, one-dimensional tensor of that dtype), ascending
    and without overlap. What no part covers is zero. Instead of parts a native ``ByteSource`` may bring the elements
    when they are written down. ``shape``: of the tensor that this stands for, in row-major order."""

    def __init__(self, numel, dtype, parts=(), source=None, shape=None):
        self.numel, self.dtype, self.shape = numel, dtype, tuple(shape or (numel,))
        self.parts, at = ([], 0) if source is None else ([source], numel)
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
            if torch.is_tensor(part):
                made[at : at + part.numel()] = part
                at += part.numel()
            else:
                part.copy_to(made)
        return made
