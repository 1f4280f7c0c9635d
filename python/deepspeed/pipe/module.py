"""``PipelineModule``: a model as a list of layers, of which each rank builds and runs its own."""

import functools
import itertools

import torch
from torch import nn

from deepspeed import _native
from deepspeed import comm as dist
from deepspeed._compat import TORCH2
from deepspeed.accelerator import get_accelerator
from deepspeed.activation_checkpointing import checkpointing
from deepspeed.comm import mesh
from deepspeed.log import log_dist
from deepspeed.pipe.layer_files import LayerFiles
from deepspeed.pipe.layers import LayerSpec, TiedLayerSpec, as_layers, call_of, count_parameters, describe
from deepspeed.pipe.partitioning import partition
from deepspeed.pipe.position import LAYER, Position
from deepspeed.pipe.profile import profile_layers, tensors_of
from deepspeed.pipe.recompute import segments
from deepspeed.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.utils.forwarding import answers_from
from deepspeed.utils.seeds import set_random_seed


@answers_from({"topology": "_topo", "mpu": "_grid", "num_pipeline_stages": "num_stages"})
class PipelineModule(LayerFiles, nn.Module):
    """Cuts ``layers`` into stages. Each layer is called with what the one before it returned: a tensor, or a tuple of
    tensors. Every rank of the job makes one, after ``deepspeed.init_distributed()``.

    Args:
        layers: an ``nn.Sequential``, or modules, ``LayerSpec``s, ``TiedLayerSpec``s and functions. Of specs a rank
            builds those of its own stage only.
        num_stages, topology: one of them: the number of stages (other ranks are copies), or a ``ProcessTopology``.
        loss_fn: ``loss_fn(outputs, labels)`` on the last stage.
        seed_layers, seed_fn, base_seed: whether ``seed_fn`` (None: ``set_random_seed``) is called with ``base_seed +
            number`` before a layer is built, and with ``base_seed * micro-batch + number`` before it runs.
        partition_method: ``"uniform"``, ``"parameters"``, ``"type:REGEX"``, ``"profile"`` or a list of bounds.
        activation_checkpoint_interval: layers per recomputed segment; 0: none. activation_checkpoint_func: what runs
            one. checkpointable_layers: names of classes; only segments of these are recomputed.
        dynamic_shape: shapes differ between micro-batches.
        virtual_stages: parts of the model on each stage. placement: ``"loop"``: stages have parts 0, p, 2p ... and so
            on; ``"v"``: down the stages and up again, for the schedules zb-v and dualpipe-v.
        profile_input: a micro-batch of inputs, for ``partition_method="profile"``.
    """

    schedule = None  # that the module trains with; None: pipeline.schedule of the configuration decides

    def __init__(
        self,
        layers,
        num_stages=None,
        topology=None,
        loss_fn=None,
        seed_layers=False,
        seed_fn=None,
        base_seed=1234,
        partition_method="parameters",
        activation_checkpoint_interval=0,
        activation_checkpoint_func=checkpointing.checkpoint,
        checkpointable_layers=None,
        dynamic_shape=False,
        virtual_stages=1,
        placement="loop",
        profile_input=None,
    ):
        super().__init__()
        if num_stages is None and topology is None:
            raise RuntimeError("PipelineModule needs num_stages= or topology=")
        if not dist.is_initialized():
            raise RuntimeError("PipelineModule needs a job: call deepspeed.init_distributed() first")
        if checkpointable_layers is not None and not isinstance(checkpointable_layers, (list, tuple, set)):
            raise ValueError(f"checkpointable_layers is {checkpointable_layers!r}: give a list of class names")
        self.loss_fn, self.dynamic_shape = loss_fn, dynamic_shape
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn or set_random_seed, base_seed
        self.checkpointable_layers = checkpointable_layers
        self.activation_checkpoint_func = activation_checkpoint_func
        self.micro_offset = 0
        self.running_layer = None  # the number in the model of the layer that ran last
        self.position = Position()

        self._topo = topology if topology is not None else self._stages_and_copies(num_stages)
        self._grid = PipelineParallelGrid(self._topo)
        self.global_rank, self.world_size = self._grid.global_rank, self._grid.world_size
        self.num_stages, self.stage_id = self._grid.pipe_parallel_size, self._grid.get_stage_id()
        if num_stages not in (None, self.num_stages):
            raise ValueError(
                f"num_stages {num_stages} differs from the topology's {self.num_stages}: leave one of them out"
            )
        self.pipe_shape = _native._C.pipe.Shape(self.num_stages, virtual_stages, 1, placement)

        self._layer_specs = as_layers(layers)
        self._num_layers = len(self._layer_specs)
        self.layer_costs = None  # of every layer, where they were measured
        self.partition_method, self.profile_input = partition_method, profile_input
        parts = self.num_stages * virtual_stages
        measure = functools.partial(self._measure, profile_input)
        self.parts = partition(self._layer_specs, parts, partition_method, measure, self._count_layer_params)
        bounds = [self.pipe_shape.virtual_stage(self.stage_id, chunk) for chunk in range(virtual_stages)]
        self._chunks = [range(self.parts[part], self.parts[part + 1]) for part in bounds]
        self.local_layers = [layer for chunk in self._chunks for layer in chunk]  # their numbers in the model

        self.forward_funcs, self.fwd_map = [], {}
        self._modules_by_position = []  # the module behind each of forward_funcs, or None
        self.tied_modules, self.tied_weight_attrs = nn.ModuleDict(), {}
        self._tied_layers = {}  # key -> its layers in the whole model
        for number, layer in enumerate(self._layer_specs):
            if isinstance(layer, TiedLayerSpec):
                self._tied_layers.setdefault(layer.key, []).append(number)
        for number in self.local_layers:
            self._build(number, self._layer_specs[number])
        self.set_checkpoint_interval(activation_checkpoint_interval)
        self.to(get_accelerator().current_device_name())
        self.ds_saved_layers = self._saved_layers()
        self.tied_comms = self._tie()
        self._synchronize_tied_weights()
        self._report()

    # ---- how the model is cut ----------------------------------------------------------------------------------------
    @staticmethod
    def _stages_and_copies(num_stages):
        world = dist.get_world_size()
        if num_stages < 1 or world % num_stages:
            raise RuntimeError(
                f"num_stages {num_stages} does not divide the {world} ranks of the job: each stage has equally many"
            )
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=world // num_stages)

    def _count_layer_params(self):
        """Trainable elements of each layer, for ``partition_method="parameters"``. Scripts replace it."""
        return [count_parameters(layer) for layer in self._layer_specs]

    def _measure(self, sample):
        if sample is None:
            raise ValueError("partition_method 'profile' needs profile_input=: the inputs of one micro-batch")
        if mesh.made_here().planned:
            raise ValueError(
                "partition_method 'profile' measures layers, which a plan cannot: pass the bounds of the parts, which "
                "PipelineModule.partitions() returns in a run"
            )
        self.layer_costs = profile_layers(self._layer_specs, sample)
        return [cost.seconds for cost in self.layer_costs]

    def _report(self):
        lines = [f"pipeline of {self._num_layers} layers in {len(self.parts) - 1} parts on {self.num_stages} stages:"]
        for part, (start, stop) in enumerate(zip(self.parts, self.parts[1:])):
            names = ", ".join(describe(number, self._layer_specs[number]) for number in range(start, stop))
            lines.append(f"  part {part}, stage {self.pipe_shape.rank_of(part)}: {names}")
        log_dist("\n".join(lines), ranks=[0])

    def partitions(self):
        """Bounds of the parts: part i has layers ``bounds[i]`` to ``bounds[i + 1] - 1``."""
        return list(self.parts)

    def stage_owner(self, layer_idx):
        """The stage that has layer ``layer_idx``."""
        if not 0 <= layer_idx < self._num_layers:
            raise IndexError(f"there is no layer {layer_idx}: the pipeline has {self._num_layers}")
        part = next(part for part in range(len(self.parts) - 1) if layer_idx < self.parts[part + 1])
        return self.pipe_shape.rank_of(part)

    # ---- layers of this stage ----------------------------------------------------------------------------------------
    def _build(self, number, layer):
        if isinstance(layer, PipelineModule):
            raise NotImplementedError(f"layer {number} is a PipelineModule: give its layers themselves")
        if self.seed_layers:
            self.seed_fn(self.base_seed + number)
        module, name = None, str(number)
        if isinstance(layer, TiedLayerSpec):
            if layer.key not in self.tied_modules:
                self.tied_modules[layer.key] = layer.build()
                self.tied_weight_attrs[layer.key] = layer.tied_weight_attr
            module = self.tied_modules[layer.key]
        elif isinstance(layer, (LayerSpec, nn.Module)):
            module = layer.build() if isinstance(layer, LayerSpec) else layer
            self.add_module(name, module)
        self.fwd_map[name] = len(self.forward_funcs)
        self.forward_funcs.append(call_of(layer, module))
        self._modules_by_position.append(module)

    def compile(self, *args, **kwargs):
        """Each layer of this stage through ``torch.compile``."""
        if not TORCH2:
            raise RuntimeError("PipelineModule.compile needs torch 2.0 or later, which has torch.compile")
        for position, layer in enumerate(self.forward_funcs):
            if isinstance(layer, nn.Module):
                layer.compile(*args, **kwargs)
            else:
                self.forward_funcs[position] = torch.compile(layer, *args, **kwargs)

    def get_additional_losses(self):
        """Losses beside the one of ``loss_fn``, by name, or None; to be overridden."""
        return None

    # ---- forward -----------------------------------------------------------------------------------------------------
    def forward(self, forward_input, chunk=None):
        """Runs the layers of this stage; of its part number ``chunk`` where it has several."""
        if chunk is None:
            if len(self._chunks) > 1:
                raise ValueError(
                    f"this stage has {len(self._chunks)} parts of the model: say which, chunk=0 is the first"
                )
            chunk = 0
        self.__dict__["micro_offset"] += chunk == 0
        first = sum(len(before) for before in self._chunks[:chunk])
        last = first + len(self._chunks[chunk])
        x = forward_input
        for begin, end, again in self._segments(first, last):
            x = self._recomputed(begin, end, x) if again and torch.is_grad_enabled() else self._run(begin, end, x)
        if self.local_layers[last - 1] + 1 < self._num_layers:
            self._check_output(last - 1, x)
        return x

    def _run(self, first, last, x, offset=None):
        for position in range(first, last):
            self.__dict__["running_layer"] = self.local_layers[position]
            self.position.words[LAYER] = self.local_layers[position] + 1
            if self.seed_layers:
                micro = self.micro_offset if offset is None else offset
                self.seed_fn(self.base_seed * micro + self.local_layers[position])
            x = self.forward_funcs[position](x)
        return x

    def _recomputed(self, first, last, x):
        offset, packed = self.micro_offset, isinstance(x, tuple)

        def segment(*inputs):
            return self._run(first, last, inputs if packed else inputs[0], offset)

        run = self.activation_checkpoint_func
        # Reentrant recomputation hangs its gradients on those of the inputs: the first layers have none.
        if run is checkpointing.checkpoint and not any(one.requires_grad for one in tensors_of(x)):
            run = checkpointing.non_reentrant_checkpoint
        return run(segment, *(x if packed else (x,)))

    def _check_output(self, position, x):
        ours = isinstance(x, torch.Tensor) or (isinstance(x, tuple) and len(x) == len(tensors_of(x)) > 0)
        if not ours:
            number = self.local_layers[position]
            raise TypeError(
                f"{describe(number, self._layer_specs[number])} is the last of stage {self.stage_id} and returned "
                f"{type(x).__name__}: what goes to another stage is a tensor or a tuple of tensors"
            )

    # ---- recomputed segments -----------------------------------------------------------------------------------------
    def set_checkpoint_interval(self, interval):
        """Layers per recomputed segment; 0: all activations are kept. ``is_checkpointable_results`` becomes a list that
        tells of each segment of this stage whether it is recomputed; it is empty where none is."""
        if interval < 0:
            raise ValueError(f"activation_checkpoint_interval {interval}: at least 0")
        self.activation_checkpoint_interval = interval
        ends = list(itertools.accumulate(len(chunk) for chunk in self._chunks))
        runs = zip([0, *ends], ends) if interval else ()
        self.is_checkpointable_results = [again for run in runs for *_, again in self._segments(*run)]

    def _segments(self, first, last):
        calls = self.forward_funcs[first:last]
        for begin, end, again in segments(calls, self.activation_checkpoint_interval, self.checkpointable_layers):
            yield first + begin, first + end, again

    # ---- tied layers -------------------------------------------------------------------------------------------------
    def _tie(self):
        """For each key of which this stage and others have copies: who they are, their group, module and weights."""
        tied = {}
        for key, layers in self._tied_layers.items():  # in one order on all ranks
            stages = sorted({self.stage_owner(layer) for layer in layers})
            if self.stage_id not in stages or len(stages) == 1:
                continue
            ranks = [self._grid.stage_to_global(stage) for stage in stages]
            tied[key] = {
                "ranks": ranks,
                "group": mesh.group_over(ranks),
                "weight_attr": self.tied_weight_attrs[key],
                "module": self.tied_modules[key],
            }
            # Norms count the copy of the first stage.
            for weight in self.tied_weights(key):
                weight.ds_pipe_replicated = self.stage_id != stages[0]
        return tied

    def tied_weights(self, key):
        """Those of ``key`` that stages have copies of."""
        module = self.tied_modules[key]
        return [functools.reduce(getattr, attr.split("."), module) for attr in self.tied_weight_attrs[key]]

    def get_tied_weights_and_groups(self):
        """``(weight, group)`` of every tied weight that other stages have, too."""
        return [(weight, tied["group"]) for key, tied in self.tied_comms.items() for weight in self.tied_weights(key)]

    def allreduce_tied_weight_gradients(self):
        """Adds up the gradients of tied weights over the stages that have them."""
        for weight, group in self.get_tied_weights_and_groups():
            if weight.grad is None:  # another stage may have one
                weight.grad = torch.zeros_like(weight)
            dist.all_reduce(weight.grad, group=group)

    def _synchronize_tied_weights(self):
        for key, tied in self.tied_comms.items():
            for weight in self.tied_weights(key):
                dist.broadcast(weight.data, min(tied["ranks"]), group=tied["group"])


class DualPipeVModule(PipelineModule):
    """A ``PipelineModule`` whose stages have two parts each, down and up again, and that trains with the schedule
    ``dualpipe-v``, which the configuration need not name. Arguments as for ``PipelineModule``."""

    schedule = "dualpipe-v"

    def __init__(self, layers, num_stages=None, **options):
        super().__init__(layers, num_stages=num_stages, **{"virtual_stages": 2, "placement": "v", **options})
