"""Tensor parallelism: the layers of an engine's model that ranks share, and the batches that these ranks get."""

import torch

from deepspeed import comm as dist
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist
from deepspeed.module_inject.tp_model import cut_over
from deepspeed.pipe.module import PipelineModule

_CHECKED = 3  # batches after the start whose equality is checked


@engine_parts.add("_tensors")
class TensorParallel(Part):
    """A part of the engine: cuts the layers of its model over the ranks of the axis tp."""

    def cut(self):
        """Every rank calls it, before the optimizer sees the parameters."""
        engine = self.engine
        section, parallel = engine._config.tensor_parallel_config, engine.parallel
        self.seen = 0
        self.ranks = parallel.mp_world_size if section.autotp_size > 1 else 1
        if self.ranks == 1 or isinstance(engine.module, PipelineModule):
            return
        cut_over(engine.module, parallel.mp_group, section)
        log_dist(
            f"Tensor parallelism: {self.ranks} ranks have the same batch, so a step has "
            f"{engine.train_batch_size() // self.ranks} samples on {parallel.data_world_size} data-parallel ranks",
            ranks=[0],
        )

    def see_inputs(self, inputs, kwargs):
        """RuntimeError on every rank of a group whose ranks have different batches."""
        if self.ranks == 1 or self.seen >= _CHECKED or not self.engine.training:
            return
        self.seen += 1
        check_same(inputs, kwargs, self.engine.parallel.mp_group)


def check_same(args, kwargs, group):
    """Raises RuntimeError on every rank of ``group`` where they call the model with different tensors."""
    named = [*((f"argument {index}", one) for index, one in enumerate(args)), *kwargs.items()]
    own = [(name, tuple(one.shape), _digest(one)) for name, one in named if isinstance(one, torch.Tensor)]
    everyones = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyones, own, group=group)
    for rank, theirs in enumerate(everyones):
        for first, other in zip(everyones[0], theirs):
            if first != other:
                ranks = dist.get_all_ranks_from_group(group)
                raise RuntimeError(
                    f"Data inconsistency within the TP group: tensor '{first[0]}' of rank {ranks[rank]} "
                    f"(shape {list(other[1])}) differs from that of rank {ranks[0]} (shape {list(first[1])}). "
                    f"Ranks that share layers (tensor_parallel.autotp_size is {len(ranks)}, these are {ranks}) need the same "
                    "batch: give the sampler engine.dp_world_size replicas and the data-parallel rank"
                )


def _digest(tensor):
    """Two numbers that differ for most pairs of different tensors."""
    values = tensor.detach().double().flatten()
    weights = torch.arange(1, values.numel() + 1, dtype=values.dtype, device=values.device)
    return float(values.sum()), float((values * weights.sin()).sum())
