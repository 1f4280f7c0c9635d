"""Tensor parallelism: the layers of an engine's model that ranks share, and the batches that these ranks get."""

from deepspeed import comm as dist
from deepspeed.config.errors import config_error
from deepspeed.config.inference import as_dtype
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist
from deepspeed.module_inject.tp_model import cut_over
from deepspeed.pipe.module import PipelineModule
from deepspeed.utils.rank_differences import first_difference

_CHECKED = 3  # batches after the start whose equality is checked


@engine_parts.add("_tensors")
class TensorParallel(Part):
    """A part of the engine: cuts the layers of its model over the ranks of the axis tp."""

    ranks, seen = 1, 0  # the ranks that share layers; batches that were compared

    def cut(self):
        """Every rank calls it, before the optimizer sees the parameters."""
        engine = self.engine
        section, parallel = engine._config.tensor_parallel_config, engine.parallel
        if section.autotp_size <= 1:
            return
        self.ranks = parallel.mp_world_size
        if isinstance(engine.module, PipelineModule):
            raise config_error(
                f"tensor_parallel.autotp_size is {section.autotp_size}, and the layers of a PipelineModule are not cut "
                "automatically: leave it out, and let its layers slice their weights over the topology's axis model",
                ["tensor_parallel.autotp_size"],
            )
        self._check(section)
        engine._experts.keep_from_cut()
        cut_over(engine.module, parallel.mp_group, section)
        engine._experts.cut_sliced(parallel.mp_group, section)
        log_dist(
            f"Tensor parallelism: {self.ranks} ranks have the same batch, so a step has "
            f"{engine.train_batch_size() // self.ranks} samples on {parallel.data_world_size} data-parallel ranks",
            ranks=[0],
        )

    def _check(self, section):
        """Raises ValueError where the section contradicts itself or the ranks of the engine."""
        engine, size = self.engine, section.autotp_size
        rules = section.partition_config
        others = {
            "tensor_parallel.tp.tp_size": section.tp.tp_size,
            "tensor_parallel.partition_config.tp_size": 1 if rules is None else rules.tp_size,
            "the mpu's number of model-parallel ranks": self.ranks,
        }
        for name, other in others.items():
            if other not in (1, size) or name.startswith("the mpu") and other != size:
                raise config_error(
                    f"tensor_parallel.autotp_size is {size}, and {name} is {other}: make them equal",
                    ["tensor_parallel.autotp_size"],
                )
        if section.tp.mpu is not None and engine.mpu is None:
            raise config_error("tensor_parallel.tp.mpu: pass it to deepspeed.initialize, mpu=", ["tensor_parallel.tp"])
        own = dist.get_all_ranks_from_group(engine.parallel.mp_group)
        given = own if section.tp.tp_group is None else dist.get_all_ranks_from_group(section.tp.tp_group)
        if list(given) != list(own):
            raise config_error(
                f"tensor_parallel.tp.tp_group has the ranks {list(given)}, and neighbours share layers: {list(own)}. "
                "Leave it out, or pass an mpu with that group",
                ["tensor_parallel.tp.tp_group"],
            )
        dtype, own = engine._config._param_dict.get("tensor_parallel", {}).get("dtype"), engine.get_data_types()[0]
        if dtype is not None and as_dtype(dtype) is not own:
            raise config_error(
                f"tensor_parallel.dtype is {dtype}, and the engine computes in {own}: correct it or leave it out, "
                "because the sections fp16 and bf16 decide",
                ["tensor_parallel.dtype"],
            )

    def see_inputs(self, inputs, kwargs):
        """RuntimeError on every rank of a group whose ranks have different batches."""
        if self.ranks == 1 or self.seen >= _CHECKED or not self.engine.training:
            return
        self.seen += 1
        check_same(inputs, kwargs, self.engine.parallel.mp_group)


def check_same(args, kwargs, group):
    """Raises RuntimeError on every rank of ``group`` where they call the model with different tensors."""
    found = first_difference([*((f"argument {index}", one) for index, one in enumerate(args)), *kwargs.items()], group)
    if found is not None:
        (name, rank, shape, first, wanted), ranks = found, dist.get_all_ranks_from_group(group)
        raise RuntimeError(
            f"Data inconsistency within the TP group: tensor '{name}' of rank {rank} (shape {shape}) differs from that "
            f"of rank {first} (shape {wanted}). Ranks that share layers (tensor_parallel.autotp_size is {len(ranks)}, "
            f"these are {ranks}) need the same batch: give the sampler engine.dp_world_size replicas and the "
            "data-parallel rank"
        )
