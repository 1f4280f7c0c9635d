"""Means over ranks of values that travel as signs, outside of an engine (``csrc/comm/compressed/sign_exchange.h``)."""

import torch

from deepspeed import _native
from deepspeed.comm import group_communicators


class SignMeans:
    """``group``: torch's group of the ranks, None for all of them. ``communicator``: a native one instead."""

    def __init__(self, group=None, communicator=None):
        self._group, self._communicator, self._exchanges = group, communicator, {}

    def _exchange(self, tensor):
        device = str(tensor.device)
        if device not in self._exchanges:
            ranks = self._communicator or group_communicators.native_of(self._group, tensor)
            self._exchanges[device] = _native._C.SignExchange(ranks, device, torch.get_num_threads())
        return self._exchanges[device]

    @torch.no_grad()
    def compressed_allreduce(self, buffer_m, worker_error, server_error, local_rank=None):
        """``buffer_m`` becomes its mean over the ranks, as far as signs and one scale of each rank say it. Every rank
        calls it.

        Args:
            buffer_m: contiguous fp32 tensor.
            worker_error: fp32, at least as long; what earlier calls have lost, and then what this one has lost.
            server_error: fp32, at least as long as the slice of a rank; the same of this rank as an owner.
            local_rank: for old callers; tensors say their devices themselves.

        Returns:
            ``buffer_m``.
        """
        self._exchange(buffer_m).mean(buffer_m, worker_error, server_error)
        return buffer_m
