"""Chunks of a sequence: the tokens of each rank, and the memory in which chunks wait."""

import torch

from deepspeed.utils.waiting_tensors import Waiting, store_of


class FPDT_InputConstruct(torch.nn.Module):
    """The part of a batch (``tokens`` is ``[batch, sequence, ...]``) that rank ``sp_rank`` of ``sp_size`` has, chunk by
    chunk.

    The sequence is cut into chunks of ``args.ds_sequence_parallel_fpdt_chunk_size`` tokens (the last one may be
    shorter), each chunk into ``sp_size`` equal parts: a rank has its part of every chunk, so that all work on the same
    chunk at the same time. ``generate()`` returns ``(tokens, labels, loss_mask, attention_mask, position_ids)``, all
    cut the same way; the attention mask, and what is None, as they are.
    """

    def __init__(self, tokens, labels, loss_mask, attention_mask, position_ids, args, sp_size, sp_rank):
        super().__init__()
        self.tokens, self.labels, self.loss_mask = tokens, labels, loss_mask
        self.attention_mask, self.position_ids = attention_mask, position_ids
        self.sp_size, self.sp_rank = sp_size, sp_rank
        self.batch_size, self.global_seq_len = tokens.shape[:2]
        wanted = args.ds_sequence_parallel_fpdt_chunk_size
        if wanted < sp_size or wanted % sp_size or self.global_seq_len % sp_size:
            raise ValueError(
                f"a sequence of {self.global_seq_len} tokens in chunks of {wanted} "
                f"(ds_sequence_parallel_fpdt_chunk_size) for {sp_size} ranks: both must be multiples of the ranks"
            )
        self.local_seq_len, self.chunk_size = self.global_seq_len // sp_size, wanted // sp_size
        starts = range(0, self.local_seq_len, self.chunk_size)
        self.num_chunk_per_gpu = len(starts)
        sizes = [min(self.chunk_size, self.local_seq_len - start) for start in starts]
        positions = [
            torch.arange(size) + start * sp_size + sp_rank * size for start, size in zip(starts, sizes, strict=True)
        ]
        self.positions = torch.cat(positions).to(tokens.device)

    def generate(self):
        cut = [
            None if tensor is None else tensor.index_select(1, self.positions.to(tensor.device)).contiguous()
            for tensor in (self.tokens, self.labels, self.loss_mask, self.position_ids)
        ]
        return cut[0], cut[1], cut[2], self.attention_mask, cut[3]


class Store:
    """Chunks of tensors by name and number, which may wait elsewhere until they are asked for.

    ``offload``: False; True: in host memory; a text: in files in that folder.
    """

    def __init__(self, device, offload):
        self.store, self.kept = store_of(device, offload), {}

    def put(self, name, index, tensor):
        tensor = tensor.detach()
        self.kept[name, index] = tensor if self.store is None else Waiting(self.store, tensor)

    def get(self, name, index):
        found = self.kept[name, index]
        return found if self.store is None else found.get()

    def ahead(self, names, index):
        """``names`` of chunk ``index`` are asked for next, where they are here."""
        for name in names if self.store is not None else ():
            if (name, index) in self.kept:
                self.kept[name, index].prefetch()

    def add(self, name, index, tensor):
        """Adds ``tensor`` to the stored one, or stores it as the first."""
        if (name, index) in self.kept:
            tensor = self.get(name, index) + tensor
        self.put(name, index, tensor)

    def take(self, name, index):
        tensor = self.get(name, index)
        del self.kept[name, index]
        return tensor
