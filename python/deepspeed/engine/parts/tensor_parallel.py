"""Tensor parallelism: the layers of an engine's model that ranks share, and the batches that these ranks get."""

from deepspeed import comm as dist
from deepspeed.checkpoint.constants import TENSOR_CUTS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.config.errors import config_error
from deepspeed.config.inference import as_dtype
from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import log_dist
from deepspeed.module_inject.probe import LayerChain
from deepspeed.module_inject.tp_model import cut_over
from deepspeed.module_inject.universal_info import info_of, metas_of
from deepspeed.pipe.layer_chain import all_layers
from deepspeed.pipe.module import PipelineModule
from deepspeed.utils.param_cut import cut_of
from deepspeed.utils.rank_differences import first_difference
from deepspeed.zero.parameters.param_ranks import ModuleTensors

_CHECKED = 3  # batches after the start whose equality is checked


@engine_parts.add("_tensors")
class TensorParallel(Part):
    """A part of the engine: cuts the layers of its model over the ranks of the axis tp."""

    group = None  # torch's, of the ranks that share layers
    ranks, seen = 1, 0  # the ranks that share layers; batches that were compared
    stages = ()  # of a pipeline: what _tables_of tells of each
    parts = False  # each rank has a part of every sequence between blocks

    def cut(self):
        """Every rank calls it, before the optimizer sees the parameters."""
        engine = self.engine
        section, parallel = engine._config.tensor_parallel_config, engine.parallel
        if section.autotp_size <= 1:
            return
        self.group, chain = parallel.mp_group, None
        if isinstance(engine.module, PipelineModule):
            self.group = engine.module.mpu().get_slice_parallel_group()
            chain = LayerChain(all_layers(engine.module), engine.module.profile_input)
        self.ranks = dist.get_world_size(self.group) if chain is not None else parallel.mp_world_size
        self._check(section)
        engine._experts.keep_from_cut()
        self.parts = cut_over(engine.module, self.group, section, chain=chain).split
        engine._experts.cut_sliced(self.group, section)
        if chain is not None and engine.module.num_stages > 1:
            self.stages = [None] * engine.module.num_stages
            dist.all_gather_object(self.stages, _tables_of(engine.module), group=engine.module.mpu().pp_proc_group)
        samples = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps()
        log_dist(
            f"Tensor parallelism: {self.ranks} ranks have the same batch, so a step has "
            f"{samples * parallel.data_world_size} samples on {parallel.data_world_size} data-parallel ranks",
            ranks=[0],
        )

    def saved_facts(self):
        """The slices of parameters of the model, in our form and in the published one, for checkpoints."""
        tables, metas = {}, {}
        for own, theirs in (*self.stages, _tables_of(self.engine.module)):
            tables.update(own)
            metas.update(theirs)
        for path, experts in self.engine._experts.alike():  # experts of other ranks are cut as this one's are
            for name in [one for one in tables if one.startswith(f"{path}.")]:
                rest = name[len(path) + 1 :].partition(".")[2]
                tables.update({f"{path}.{number}.{rest}": tables[name] for number in range(experts)})
        return {TENSOR_CUTS: tables, UNIVERSAL_CHECKPOINT_INFO: info_of(metas)} if tables else {}

    def _check(self, section):
        """Raises ValueError where the section contradicts itself or the ranks of the engine."""
        engine, size = self.engine, section.autotp_size
        rules = section.partition_config
        if isinstance(engine.module, PipelineModule) and self.ranks != size:
            raise config_error(
                f"tensor_parallel.autotp_size is {size}, and the topology of the PipelineModule has {self.ranks} ranks "
                "along its axis model: pass PipelineModule(topology=PipeModelDataParallelTopology(num_pp, num_mp, "
                f"num_dp)) with num_mp={size}",
                ["tensor_parallel.autotp_size"],
            )
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
        own = dist.get_all_ranks_from_group(self.group)
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
        if self.parts and kwargs.get("output_hidden_states"):
            raise config_error(
                "output_hidden_states=True needs whole sequences between blocks, and tensor_parallel.split_sequence "
                "gives each rank a part of them: leave one of them out",
                ["tensor_parallel.split_sequence"],
            )
        if self.ranks == 1 or self.seen >= _CHECKED or not self.engine.training:
            return
        self.seen += 1
        check_same(inputs, kwargs, self.group)


def _tables_of(module):
    """Tables of the slices of a module's parameters by name, and what the published form says of all parameters."""
    weights = ModuleTensors(module)
    cuts = {weights.named(name): cut_of(param) for name, param in weights.params.items()}
    tables = {name: cut.table() for name, cut in cuts.items() if cut is not None and cut.dim is not None}
    return tables, metas_of(module) if tables else {}


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
