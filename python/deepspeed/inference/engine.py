"""``deepspeed.init_inference``: a model that answers, with layers and experts spread over ranks."""

import json
import os
import time
import types

import torch

from deepspeed import comm as dist
from deepspeed._compat import TORCH2
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint.layouts import storage
from deepspeed.checkpoint.layouts.names import LATEST, latest_tag
from deepspeed.checkpoint.layouts.open_saved import open_saved
from deepspeed.checkpoint.read.weights import check_weights, load_weights, names_saved
from deepspeed.checkpoint.run_state import LoadTarget, RunState
from deepspeed.comm import mesh, mesh_views
from deepspeed.config.errors import config_error
from deepspeed.config.inference import DeepSpeedInferenceConfig, merge_inference_config
from deepspeed.formats.recorded_paths import path_below
from deepspeed.host.recorded_names import open_regular
from deepspeed.inference.cut_layers import ServedCut, group_in, group_of, size_of
from deepspeed.log import warning_once
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import AutoEPConfig, validate_autoep_post_detection
from deepspeed.module_inject.tp_model import own_weights, share_random_state
from deepspeed.moe.errors import fail
from deepspeed.moe.layer import MoE
from deepspeed.moe.serving import serve_alike, share_experts, slice_experts
from deepspeed.utils.module_attributes import attribute_or_that_of_module
from deepspeed.zero.parameters.param_ranks import ModuleTensors

# Keys whose features are not built yet -> the values that need no such feature.
_NOT_BUILT = {
    "use_triton": (False,),
    "triton_autotune": (False,),
    "keep_module_on_host": (False,),
    "set_empty_params": (False,),
    "save_mp_checkpoint_path": (None,),
    "transposed_mode": (False,),
    "enable_cuda_graph": (False,),
}


def _named_by(source, base, name):
    """The path of what the JSON file ``source`` names below ``base``; absolute names may be written out, too."""
    if isinstance(name, str) and os.path.isabs(name):
        name = os.path.relpath(name, os.path.abspath(base))
    return base if name == os.curdir else path_below(base, name, source)


def _has_stacked(saved):
    """Whether a checkpoint is of a model whose layers with experts were replaced (``expert_parallel``)."""
    return saved is not None and any(name.endswith(".experts.w1") for name in names_saved(saved))


def init_inference(model, config=None, **kwargs):
    """An ``InferenceEngine`` around ``model``, whose ``module`` is the model.

    ``config``: a dict, a path of a JSON file or a ``DeepSpeedInferenceConfig``; ``kwargs``: the same keys, see
    docs/config.md. Built are: ``dtype``; ``checkpoint``, a folder that any number of ranks and any stage has saved;
    ``tensor_parallel``; and ``moe``. Every rank calls it.

    ``tensor_parallel={"tp_size": n}`` (``mp_size=n``): n neighbours, or the ranks of its ``tp_group``, share the layers
    of blocks and the head, and so the keys and values of earlier tokens. They have to bring the same inputs, and they
    give the same results; what they sample is the same too, because they get one state of random numbers here.
    ``injection_policy={Block: ("attention.output", "mlp.output")}`` (or ``injection_policy_tuple``, for any class of
    block) says which linear layers have results that are summed, where the analysis of the model should not decide.

    ``moe`` (``ep_size``, ``moe_experts``, ``moe_type``), for models with layers of ``deepspeed.moe``, or of a kind that
    the section ``expert_parallel`` of training takes: ``ep_size`` ranks, each with tokens of its own, share experts,
    and where there are more of them than experts, each has a slice of one. Neighbours that bring the same tokens share
    experts, too.

    ``args``: an object whose ``device`` is the accelerator's, as Gaudi's guide has it; ValueError for another one.

    ``replace_with_kernel_inject`` asks for faster layers, which are not built: a warning says so, and the model's own
    layers run. NotImplementedError names a key of anything else that is still to be built.
    """
    if hasattr(kwargs.get("args"), "device"):
        _check_device(kwargs.pop("args").device)
    if isinstance(config, DeepSpeedInferenceConfig):
        if kwargs:
            raise config_error("init_inference takes a DeepSpeedInferenceConfig or keywords, not both", sorted(kwargs))
        return InferenceEngine(model, config)
    if isinstance(config, (str, os.PathLike)):
        with open(config) as file:
            config = json.load(file)
    return InferenceEngine(model, DeepSpeedInferenceConfig(**merge_inference_config(config or {}, kwargs)))


def _check_device(device):
    name = get_accelerator()._name
    if torch.device(device).type != name:
        raise ValueError(
            f"init_inference: args.device is {str(device)!r}, and the accelerator here is {name!r}: set "
            f"DS_ACCELERATOR={torch.device(device).type}, or leave args.device out"
        )


class InferenceEngine(torch.nn.Module):
    """``model`` in evaluation, on this rank's device. ``config``: a ``DeepSpeedInferenceConfig``."""

    inference_mp_group = None
    inference_ep_group = None
    expert_mp_group = None

    def __init__(self, model, config):
        super().__init__()
        self._config = config
        self._check(config)
        self.module = model
        self._times, self._timed = [], False
        self._compiled = False
        self.device = torch.device(get_accelerator().current_device_name())
        self._same = size_of(config.tensor_parallel)  # ranks that bring the same tokens
        layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, MoE)}
        self._size = self._ranks_together(layers)
        self._replaced = {}  # layers with experts of an unchanged model -> number of results
        cut = self._plan(layers) if self._same > 1 else None
        slices = self._share(layers) if layers else 1
        model.to(dtype=config.dtype)  # first: what is loaded is as wide as what serves
        path, saved = self._path(), None
        if path is not None and os.path.isdir(path):
            saved = open_saved(path, with_optimizer=False, experts=self._numbers(layers))
        replaces = not layers and (self._config.moe.ep_size > 1 or self._replaced or _has_stacked(saved))
        if replaces and _has_stacked(saved):
            layers, slices = self._replace()
        if path is not None:
            self._load(path, saved, {} if replaces else layers)
        if replaces and not _has_stacked(saved):
            layers, slices = self._replace()
        for layer in layers.values():
            if self._alike():
                serve_alike(layer, self.inference_mp_group, self._size // slices)
            elif slices > 1:
                slice_experts(layer, self.expert_mp_group)
        if cut is not None:
            cut.carry_out()
        model.to(self.device)
        if cut is not None:
            share_random_state(self.inference_mp_group)
        self.eval()

    @staticmethod
    def _check(config):
        for key, plain in _NOT_BUILT.items():
            if getattr(config, key) not in plain:
                raise NotImplementedError(f"init_inference: {key}={getattr(config, key)!r} is not built; leave it out")
        if config.replace_with_kernel_inject:
            warning_once(
                "init_inference: replace_with_kernel_inject has no effect yet, because this build has no inference "
                "kernels. The model's own layers run."
            )
        if config.dtype == torch.int8:
            raise NotImplementedError("init_inference: dtype=torch.int8 is not built; use fp32, fp16 or bf16")
        if config.dtype == torch.float16 and not get_accelerator().is_fp16_supported():
            name = get_accelerator().device_name()
            raise ValueError(f"init_inference: dtype is torch.float16, which {name} has not here; pass dtype=")

    # ---- experts -----------------------------------------------------------------------------------------------------
    def _ranks_together(self, layers):
        """The number of ranks that share the experts: ``ep_size``, or those that bring the same tokens (``mp_size``),
        whichever are more."""
        alike, size = self._same, self._config.moe.ep_size
        size, key = (alike, "tensor_parallel.tp_size") if alike > size else (size, "moe.ep_size")
        if size % self._config.moe.ep_size != 0 or size % alike != 0:
            raise config_error(
                f"moe.ep_size = {self._config.moe.ep_size} and tensor_parallel.tp_size (mp_size) = {alike}: one has to "
                "be a multiple of the other",
                ["moe.ep_size", "tensor_parallel.tp_size"],
            )
        if size > 1 and not dist.is_initialized():
            dist.init_distributed(get_accelerator().communication_backend_name())
        world = dist.get_world_size() if dist.is_initialized() else 1
        by_neighbours = key == "moe.ep_size" or group_in(self._config.tensor_parallel) is None
        if by_neighbours and world % size != 0:
            raise config_error(f"{key} = {size} does not divide the {world} ranks of this job", [key])
        return size

    def _plan(self, layers):
        """The ``ServedCut`` of the layers that are cut over the ranks that bring the same tokens."""
        self.inference_mp_group = group_of(self._config.tensor_parallel, self._same)
        if not layers:
            self._replaced = {spec.moe_module_name: 1 + spec.return_router_logits for spec in self._specs()}
        experts = {**dict.fromkeys(layers, 3), **self._replaced}
        if experts and group_in(self._config.tensor_parallel) is not None:
            neighbours = self._ranks(1, 1, ["alike.tp"])
            given = sorted(dist.get_all_ranks_from_group(self.inference_mp_group))
            if given != neighbours:
                raise config_error(
                    f"tensor_parallel.tp_group has the ranks {given}: those that share experts have to be neighbours, "
                    f"{neighbours} here; leave it out",
                    ["tensor_parallel.tp_group"],
                )
        cut = ServedCut(self.module, self.inference_mp_group, self._config, experts)
        cut.same_weights(experts)
        return cut

    def _specs(self):
        """The layers with experts of an unchanged model that can be replaced."""
        try:
            return AutoEP(self.module, AutoEPConfig(enabled=True)).ep_parser()
        except ValueError:
            return []

    def _alike(self):
        """Whether all ranks that share experts bring the same tokens."""
        return 1 < self._same == self._size

    def _make_groups(self, fewest):
        """``(ranks that share the experts of a layer, ranks with a slice of each)`` where ``fewest`` is the number of
        experts of the layer with the fewest."""
        moe, size = self._config.moe, self._size
        self.inference_ep_group, self.expert_mp_group = moe.expert_group, moe.ep_mp_group
        shared = min(size, fewest)
        slices = size // shared
        if size % shared != 0:
            fail("", f"ep_size={size} ranks cannot share {fewest} experts evenly, nor slices of them")
        if size > 1:
            if self.inference_ep_group is None and shared > 1:
                self.inference_ep_group = mesh.group_over(self._ranks(shared, slices, ["experts.ep"]))
            if self.expert_mp_group is None and slices > 1:
                self.expert_mp_group = mesh.group_over(self._ranks(shared, slices, ["experts.slice"]))
        return shared, slices

    def _ranks(self, shared, slices, axes):
        """Ranks that differ from this one along ``axes`` only: "experts.dp" (other copies of all experts),
        "experts.ep", "experts.slice" (other slices of the same experts: neighbours), and "alike.tp", the neighbours
        that bring the same tokens."""
        grid = mesh_views.of_job()
        grid.fold("experts", ["dp"], [("dp", 0, ""), ("ep", shared, ""), ("slice", slices, "")])
        alike = ("tp", self._same, "tensor_parallel.tp_size")
        grid.fold("alike", ["dp"], [("dp", 0, ""), alike])
        return grid.list(axes, dist.get_rank())

    def _share(self, layers):
        """Spreads experts over ranks; returns how many ranks have a slice of each."""
        self._check_layers(layers, self._config.moe)
        shared, slices = self._make_groups(min(layer.num_experts for layer in layers.values()))
        for name, layer in layers.items():
            share_experts(layer, self.inference_ep_group, shared, name)
        return slices

    @staticmethod
    def _check_layers(layers, moe):
        numbers = [layer.num_experts for layer in layers.values()]
        given = list(moe.num_experts)
        if given != [1] and given not in ([numbers[0]] * (len(set(numbers)) == 1), numbers):
            raise config_error(
                f"moe_experts = {given}, and the model's MoE layers have {numbers} experts", ["moe.num_experts"]
            )
        wanted = str(getattr(moe.type, "value", moe.type))
        if wanted == "residual":
            others = [name for name, layer in layers.items() if not layer.use_residual]
            if others:
                raise config_error(
                    f"moe_type = 'residual', and MoE layer '{others[0]}' has no dense expert (use_residual)",
                    ["moe.type"],
                )

    def _replace(self):
        """Layers with experts of an unchanged model, as the section ``expert_parallel`` of training. Returns their
        replacements by name, and how many ranks have a slice of each expert."""
        if not dist.is_initialized():
            dist.init_distributed(get_accelerator().communication_backend_name())
        found = AutoEP(self.module, AutoEPConfig(enabled=True))
        specs = found.ep_parser()
        shared, slices = self._make_groups(min(spec.num_experts for spec in specs))
        found.config.autoep_size = shared
        validate_autoep_post_detection(found.config, specs)
        same = mesh.group_over(self._ranks(shared, slices, ["experts.dp", "experts.slice"]))
        handles = types.SimpleNamespace(spec=None, ep_group=self.inference_ep_group, edp_group=same)
        made = found.replace_moe_layers(specs, shared, dist.get_rank() % self._size // slices)
        for layer in made.values():
            layer.set_deepspeed_parallelism(folding_group_handles=handles)
        return made, slices

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def _path(self):
        """The folder or the file that ``checkpoint`` names, in one of its forms; None without."""
        found, base = self._config.checkpoint, self._config.base_dir
        if found is None:
            found = self._config.checkpoint_config.checkpoint_dir
        source = None
        if isinstance(found, str) and found.endswith(".json"):
            source = os.path.join(base, found)
            with open_regular(source) as file:
                found = json.loads(file.read())
        if isinstance(found, dict):
            if found.get("base_dir"):
                base = found["base_dir"] if source is None else _named_by(source, base, found["base_dir"])
            named = found.get("checkpoints", found.get("checkpoint"))
            named = [named] if isinstance(named, str) else list(named or ())
            if len(named) != 1:
                raise NotImplementedError(
                    f"init_inference: checkpoint names {len(named)} files; one folder, or one file of the whole model, "
                    "can be loaded"
                )
            found = named[0]
        if not found:
            return None
        path = os.path.join(base, found) if source is None else _named_by(source, base, found)
        if not os.path.exists(path):
            raise FileNotFoundError(f"init_inference: checkpoint {path!r} does not exist")
        tag = latest_tag(path) if os.path.isdir(path) else None
        return path_below(path, tag, os.path.join(path, LATEST), "tag") if tag else path

    def _load(self, path, saved, layers):
        if saved is None:
            state = storage.read(path)
            self.load_module_state_dict({"module": state.get("module", state.get("model", state))})
            return
        prefixes = tuple(f"{name}.deepspeed_moe.experts.deepspeed_experts." for name in layers)
        elsewhere = {name for name in names_saved(saved) if name.startswith(prefixes)}
        run = RunState(ModuleTensors(self.module), self.module.state_dict)
        check_weights(run, saved, True, elsewhere=elsewhere)
        load_weights(run, LoadTarget(self.module), saved, elsewhere=elsewhere)

    @staticmethod
    def _numbers(layers):
        """Numbers of the experts of this rank; None: there are no layers of ``deepspeed.moe``."""
        lists = [layer.deepspeed_moe.experts.deepspeed_experts for layer in layers.values()]
        return {number for experts in lists for number in experts.ds_expert_numbers.values()} if layers else None

    def load_module_state_dict(self, checkpoint, strict=True):
        """Loads ``checkpoint["module"]``, whole tensors, into the model, of which this rank has slices."""
        self.module.load_state_dict(own_weights(self.module, checkpoint["module"]), strict=strict)

    # ---- answers -----------------------------------------------------------------------------------------------------
    def forward(self, *inputs, **kwargs):
        """The result of the model."""
        begin = time.perf_counter()
        found = self.module(*inputs, **kwargs)
        if self._timed:
            get_accelerator().synchronize()
            self._times.append(1000 * (time.perf_counter() - begin))
        return found

    def profile_model_time(self, use_cuda_events=True):
        """From now on ``model_times`` knows how long each forward took; the host waits for the device then, so that
        ``use_cuda_events`` makes no difference."""
        self._timed = True

    def model_times(self):
        """Milliseconds of each forward since the last call. AssertionError before ``profile_model_time``."""
        assert self._timed, "model profiling is not enabled: call profile_model_time()"
        found, self._times = self._times, []
        return found

    def compile(
        self,
        backend=get_accelerator().get_compile_backend(),  # noqa: B008 (the published signature)
        compile_kwargs={},  # noqa: B006 (the same; never modified)
    ):
        """Compiles the model in place; a second call does nothing. RuntimeError on torch 1.13, without compiler."""
        if not TORCH2:
            raise RuntimeError("InferenceEngine.compile needs torch 2.0 or later, and this is 1.13: leave the call out")
        if not self._compiled:
            self.module.compile(backend=backend, **compile_kwargs)
            self._compiled = True

    @property
    def is_compiled(self):
        """True after ``compile``."""
        return self._compiled

    def destroy(self):
        """There is nothing beside the model to let go of."""

    __getattr__ = attribute_or_that_of_module
