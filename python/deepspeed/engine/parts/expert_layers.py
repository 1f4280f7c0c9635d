"""The mixture-of-experts layers of an engine's model: who shares their experts, and what these had to do."""

import contextlib
import weakref

import torch

from deepspeed import comm as dist
from deepspeed.checkpoint.autoep_universal import make_folding_metadata
from deepspeed.checkpoint.constants import FOLDING_METADATA_KEY
from deepspeed.config.errors import config_error
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.log import log_dist, logger
from deepspeed.module_inject.auto_ep import AutoEP
from deepspeed.module_inject.auto_ep_config import parse_autoep_config, validate_autoep_config
from deepspeed.module_inject.auto_ep_folding import (
    assert_group_matches_spec,
    build_folding_spec,
    make_folding_groups,
)
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.module_inject.block_twin import keep_whole
from deepspeed.module_inject.expert_cuts import cut_experts, parts_with_experts
from deepspeed.moe.errors import MoEError
from deepspeed.moe.layer import MoE
from deepspeed.moe.replaced import replace_in_optimizer, trained_instead
from deepspeed.moe.statistics import summary, traffic_of
from deepspeed.pipe.module import PipelineModule
from deepspeed.utils import groups
from deepspeed.utils.folded_gradients import sum_partial_gradients
from deepspeed.utils.norms import is_moe_param


@engine_parts.add("_experts")
class ExpertLayers(Part):
    """A part of the engine. ``layers``: name in the model -> layer, in the order of ``named_modules()``."""

    layers = {}
    folding = None  # the FoldingGroupHandles where tensor-parallel ranks share the experts of an unchanged model

    def keep_from_cut(self):
        """Says of routers and experts that tensor parallelism leaves them whole; before it cuts the model."""
        engine = self.engine
        config = self._checked_config() if engine._config.expert_parallel_config.enabled else None
        found = parts_with_experts(engine.module, config)
        for _, module, _ in found:
            keep_whole(module)
        if found and getattr(engine._config.tensor_parallel_config, "split_sequence", False):
            raise config_error(
                f"tensor_parallel.split_sequence is true, and '{found[0][0]}' is of a layer with experts, whose ranks "
                "need all tokens of a sequence: leave the key out",
                ["tensor_parallel.split_sequence"],
            )

    def cut_sliced(self, group, section):
        """Cuts the experts of layers that want it over torch's ``group``, after the layers beside them."""
        for name, layer in self.engine.module.named_modules():
            if isinstance(layer, MoE) and layer.enable_expert_tensor_parallelism:
                cut_experts(name, layer, group, section.tp_overlap_comm, section.verify)

    def alike(self):
        """``(path of a list of experts in the model, how many all ranks have)`` of layers with experts in a list."""
        for name, layer in self.layers.items():
            if isinstance(layer, MoE):
                yield f"{name}.deepspeed_moe.experts.deepspeed_experts", layer.num_experts

    def _checked_config(self):
        """The section ``expert_parallel``, which the ranks of the engine fit."""
        engine = self.engine
        config = parse_autoep_config(engine._config._param_dict)
        stages = engine.parallel.grid.pipe_parallel_size if isinstance(engine.module, PipelineModule) else 1
        validate_autoep_config(
            config,
            engine.world_size,
            stages,
            engine.mp_world_size,
            engine.sequence_parallel_size,
            use_data_before_expert_parallel=engine._config.use_data_before_expert_parallel_,
        )
        return config

    def find(self, model_parameters):
        """Every rank calls it, before parameters find their ranks: layers learn their names and make their groups.
        Returns ``model_parameters`` with those that have replaced others."""
        engine = self.engine
        if engine._config.expert_parallel_config.enabled:
            self._replace_layers()
        self._connect()
        if isinstance(engine.client_optimizer, torch.optim.Optimizer):
            replace_in_optimizer(engine.client_optimizer)
        engine.param_names = {param: name for name, param in engine.module.named_parameters()}
        return trained_instead(model_parameters)

    def _replace_layers(self):
        """The section ``expert_parallel``: layers with experts of an unchanged model make room for ones whose experts
        several ranks share."""
        engine, config = self.engine, self._checked_config()
        before_experts, size = engine._config.use_data_before_expert_parallel_, config.autoep_size
        if engine.mp_world_size > 1:
            self.folding = self._fold(size)
        elif f"ep_size_{size}" not in groups._get_expert_parallel_group_dict():
            groups._create_expert_and_data_parallel(size, use_data_before_expert_parallel_=before_experts)
        found = AutoEP(engine.module, config)
        found.replace_moe_layers(found.ep_parser(), size, groups._get_expert_parallel_rank(f"ep_size_{size}"))

    def _fold(self, size):
        """Makes the groups of ``size`` ranks that share experts, tensor-parallel ones among them."""
        parallel = self.engine.parallel
        spec = build_folding_spec(
            world_size=parallel.world_size, pp_size=1, tp_size=parallel.mp_world_size, ep_size=size
        )
        for kind, group in (("tp", parallel.mp_group), ("dense_dp", parallel.dp_group)):
            assert_group_matches_spec([dist.get_all_ranks_from_group(group)], spec, group_kind=kind)
        return make_folding_groups(spec)

    def _connect(self):
        engine = self.engine
        kinds = (MoE, AutoEPMoELayer)
        # By the name of a layer: its last statistics, and the steps for which no token has chosen each of its experts.
        self._last, self._idle = {}, {}
        self.layers = {name: module for name, module in engine.module.named_modules() if isinstance(module, kinds)}
        if not self.layers:
            return
        engine.has_moe_layers = True
        pipeline = isinstance(engine.module, PipelineModule)
        if engine.mpu is not None and not pipeline:
            groups.set_mpu(engine.mpu)
        self._add_losses()
        for name, layer in self.layers.items():
            layer.deepspeed_moe.set_name(name)
            layer.deepspeed_moe.gate.batch_group = engine.parallel.dp_group
            layer.deepspeed_moe.overlap_chunks = engine._config.moe_config.overlap_chunks
            self._idle[name] = torch.zeros(layer.num_experts, dtype=torch.int64)
            layer.stages = self._stages(name) if pipeline else None
            try:
                folded = {} if self.folding is None else {"folding_group_handles": self.folding}
                folded = folded if isinstance(layer, AutoEPMoELayer) else {}
                layer.set_deepspeed_parallelism(engine._config.use_data_before_expert_parallel_, **folded)
            except ValueError as e:
                raise MoEError(
                    f"MoE layer '{name}' shares its {layer.num_experts} experts among ep_size={layer.ep_size} ranks; "
                    f"this job has {engine.world_size} ranks, {engine.dp_world_size} of them data-parallel: {e}"
                ) from e
        if self.folding is not None:
            sum_partial_gradients(engine.module.named_parameters(), self.folding.spec, self.folding.tp_group)

    def folding_facts(self):
        """Facts of the ranks for files of optimizer states, by key; {} where no tensor-parallel ranks share experts."""
        if self.folding is None:
            return {}
        spec, parallel = self.folding.spec, self.engine.parallel
        routers = {id(param) for layer in self.layers.values() for param in layer.deepspeed_moe.gate.parameters()}
        kinds = {
            name: "expert" if is_moe_param(param) else "router" if id(param) in routers else "dense"
            for name, param in self.engine.module.named_parameters()
        }
        facts = make_folding_metadata(
            tp_size=spec.tp_size,
            tp_rank=parallel.mp_rank,
            ep_size=spec.ep_size,
            ep_rank=self.folding.ep_ranks.index(parallel.rank),
            zero_partition_group=self.folding.dense_dp_ranks,
            zero_partition_rank=parallel.dp_rank,
            zero_partition_count=parallel.dp_world_size,
            family="mixed",
            param_families=kinds,
        )
        return {FOLDING_METADATA_KEY: facts}

    def _add_losses(self):
        """Layers of a pipeline hand no loss on: its gradient is added where it is made, with the loss's factors."""
        engine, coeff = self.engine, self.engine._config.moe_config.aux_loss_coeff
        if not isinstance(engine.module, PipelineModule):
            if coeff is not None:
                raise MoEError(
                    f"moe.aux_loss_coeff={coeff} is for PipelineModule; {type(engine.module).__name__} adds the losses "
                    "that its MoE layers return in its own forward. Leave the key out"
                )
            return

        share = 0.01 if coeff is None else coeff
        engine = weakref.proxy(engine)  # autograd holds the function; it holds outputs of the engine

        def scale():
            return share * engine.stepping.loss_scale / engine.gradient_accumulation_steps()

        for layer in self.layers.values():
            layer.deepspeed_moe.loss_scale = scale

    @property
    @member
    def num_experts(self):
        """Experts of each layer."""
        return [layer.num_experts for layer in self.layers.values()]

    def _stages(self, name):
        """The number of stages of the pipeline: experts are shared within one stage."""
        grid = self.engine.parallel.grid
        stages, ranks = grid.pipe_parallel_size, self.engine.world_size
        runs = [list(range(first, first + ranks // stages)) for first in range(0, ranks, ranks // stages)]
        if list(grid.dp_group) not in runs:
            raise MoEError(
                f"MoE layer '{name}': the copies of this stage are the ranks {list(grid.dp_group)}; experts are shared "
                "in a pipeline whose outermost axis is 'pipe', beside which there is 'data' alone"
            )
        return stages

    @contextlib.contextmanager
    def _counted(self):
        statistics = [layer.deepspeed_moe.statistics for layer in self.layers.values()]
        for one in statistics:
            one.counting = self.engine.module.training
        try:
            yield
        finally:
            for one in statistics:
                one.counting = False

    def around(self, phase):
        """In a forward of the engine, routes count, unlike those of recomputations."""
        return self._counted() if self.layers and phase == "forward" else None

    def after_micro_step(self, boundary):
        """At an accumulation boundary, on all data-parallel ranks: adds up what their experts had to do."""
        if not self.layers or not boundary:
            return
        engine = self.engine
        rows = torch.cat([layer.deepspeed_moe.statistics.take() for layer in self.layers.values()])
        parallel = engine.parallel
        if parallel.dp_world_size > 1:
            dist.all_reduce(rows, group=parallel.dp_group)
        lengths = [len(layer.deepspeed_moe.statistics.row) for layer in self.layers.values()]
        rows = list(rows.split(lengths))
        if parallel.mp_world_size > 1:  # ranks with the same tokens, and with exchanges of their own
            traffic = torch.stack([traffic_of(row) for row in rows])
            dist.all_reduce(traffic, group=parallel.mp_group)
            for row, sums in zip(rows, traffic):
                traffic_of(row).copy_(sums)
        ranks = parallel.dp_world_size * parallel.mp_world_size
        for (name, layer), row in zip(self.layers.items(), (row.cpu() for row in rows), strict=True):
            self._last[name] = summary(row, layer.num_experts, ranks)
            counts = row[: layer.num_experts]
            if getattr(layer.deepspeed_moe.gate, "balance", "") == "bias" and engine.was_step_applied():
                layer.deepspeed_moe.gate.move_bias(counts, engine._config.moe_config.bias_update_rate)
            self._name_idle(name, counts)
        if engine.monitor.enabled and engine.global_rank == 0:
            engine.monitor.write_events(self._events())

    def _name_idle(self, name, counts):
        bound, idle = self.engine._config.moe_config.idle_steps, self._idle[name]
        idle += 1
        idle[counts > 0] = 0
        found = (idle == bound).nonzero().flatten().tolist() if bound else []
        if found and self.engine.global_rank == 0:
            logger.warning(
                f"MoE layer '{name}': no token has chosen the experts {found} in {bound} steps (moe.idle_steps). A "
                "larger coefficient of the auxiliary loss, noisy_gate_policy or balance='bias' spreads tokens"
            )

    def _events(self):
        wanted = ("dropped_share", "router_entropy", "busiest_over_mean", "aux_loss", "exchange_bytes", "exchange_ms")
        samples = self.engine.global_samples
        return [
            (f"Train/MoE/{layer}/{name}", found[name], samples)
            for layer, found in self._last.items()
            for name in wanted
        ]

    @member
    def print_forward_breakdown(self, fwd_time):
        """Logs ``fwd_time``, in ms, and how long this rank has waited for rows of experts since the last step."""
        waited = sum(layer.deepspeed_moe.statistics.waited() for layer in self.layers.values())
        log_dist(f"time (ms) | forward: {fwd_time:.2f} (exchange of experts' rows: {waited:.2f})", ranks=[0])

    @member
    def moe_statistics(self):
        """Figures of the last step, one dict for each MoE layer, by its name: ``tokens_per_expert`` (rows that each was
        chosen for, on all data-parallel ranks, before dropping), ``tokens``, ``dropped_share`` of the rows,
        ``router_entropy`` (mean, of a sample of the tokens, in nats), ``busiest_over_mean``, ``aux_loss`` (mean),
        ``exchange_bytes`` (that left a rank for another, gradients included) and ``exchange_ms`` (for which a rank has
        waited, the mean). Before the first step: empty.
        """
        return dict(self._last)
