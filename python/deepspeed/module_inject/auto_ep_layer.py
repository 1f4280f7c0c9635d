"""The layer that replaces a model's layer with experts: the same router, the experts of this rank, and the
exchange of rows between the ranks that share the experts. No token is dropped."""

import dataclasses
from typing import NamedTuple

import torch

from deepspeed import comm as dist
from deepspeed.log import warning_once
from deepspeed.module_inject.auto_ep_folding import mark_autoep_folding_router_parameter
from deepspeed.module_inject.auto_ep_presets.registry import get_preset_adapter
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.moe.ep_repack import repack_expert_weights, source_weights
from deepspeed.moe.ep_router import Fp32Linear, TokenChoiceTopKRouter
from deepspeed.moe.ep_tp_dispatch import (
    assert_tp_payload_consistent,
    choices_of,
    partition_assignments,
    payload_of_choices,
    restore_combined,
    shared_by_ranks,
)
from deepspeed.moe.errors import fail
from deepspeed.moe.exchange import exchange_of, named, with_gradient
from deepspeed.moe.routes import Routes
from deepspeed.moe.rows import combine_rows, dispatch_rows
from deepspeed.moe.statistics import LayerStatistics
from deepspeed.ops.token_rows import positions_of
from deepspeed.utils import groups
from deepspeed.zero.parameters.param_ranks import ParamRanks


class SplitPlan(NamedTuple):
    """Numbers of rows: to each rank, from each rank, for each expert of this rank, and for each expert from each
    rank."""

    input_splits: list[int]
    output_splits: list[int]
    local_counts: torch.Tensor
    local_counts_by_source: torch.Tensor


def compute_split_plan(selected_experts, num_experts, ep_size, num_local_experts, ep_group, num_tokens_per_expert=None):
    """The ``SplitPlan`` of tokens that have chosen ``selected_experts`` [tokens, k]; all ranks of ``ep_group`` call it.
    ``num_tokens_per_expert``: the choices of each expert, where they are known."""
    counts = num_tokens_per_expert
    if counts is None:
        counts = torch.bincount(selected_experts.reshape(-1), minlength=num_experts)
    mine = counts.to(torch.int64).reshape(ep_size, num_local_experts)
    theirs = mine.clone()
    if ep_size > 1:
        dist.all_to_all_single(theirs, mine.contiguous(), group=ep_group)
    return SplitPlan(mine.sum(1).tolist(), theirs.sum(1).tolist(), theirs.sum(0), theirs)


def compute_split_plan_from_expert_indices(expert_indices, num_experts, ep_size, num_local_experts, ep_group):
    """The same of a list of choices."""
    return compute_split_plan(expert_indices.reshape(-1, 1), num_experts, ep_size, num_local_experts, ep_group)


def resolve_score_apply_mode(spec, config_override):
    """Scores multiply what experts get, "pre", or what they make, "post". ``config_override`` "auto" or None: as the
    model does."""
    return spec.score_apply if config_override in (None, "auto") else config_override


def apply_scores_before_experts_if_enabled(routed_input, top_scores, score_apply):
    """``routed_input`` [rows, width] times the scores of the rows with "pre", itself with "post"."""
    if score_apply != "pre":
        return routed_input
    return (routed_input.float() * top_scores.reshape(-1, 1).float()).to(routed_input.dtype)


def combine_from_routed(expert_output, top_scores, token_indices_sorted, top_k, score_apply, combine_impl, shape):
    """For each token the sum of the rows that experts have made of it, as a tensor of ``shape``.

    ``expert_output``: rows in the order of the experts. ``token_indices_sorted``: whose choice each row is, token *
    top_k + choice. ``top_scores`` [tokens, top_k] are the rows' weights with "post". ``combine_impl``, "weighted_sum"
    or "legacy_bmm", is how the published layer adds up; the sum is the same, in fp32.
    """
    weights = top_scores.reshape(-1, top_k).float()
    weights = weights if score_apply == "post" else torch.ones_like(weights)
    sources = token_indices_sorted.to(torch.int32)
    slots = positions_of(sources, len(sources)).view(-1, top_k)
    return combine_rows(expert_output, weights, sources, slots).reshape(shape)


def _recorded_as(source, made):
    """``made``, as an instance of the class of ``source``, too: by that transformers finds what it records."""
    made.__class__ = type(type(source).__name__, (type(made), type(source)), {"__module__": type(source).__module__})
    return made


class _Logits(torch.nn.Module):
    """Returns the outputs of a router of transformers, for hooks that record them."""

    def forward(self, recorded, scores, experts):
        return recorded, scores, experts


class AutoEPMoELayer(torch.nn.Module):
    """The layer ``source_module``, with experts that ``ep_size`` ranks share. ``spec``: its ``MoELayerSpec``;
    ``config``: the ``AutoEPConfig``.

    Children: ``router``, ``experts`` (stacked, those of rank ``ep_rank``), and what all tokens use under the names that
    it had. The weight of the router and the dense parts are the model's own parameters.
    """

    def __init__(self, spec, source_module, ep_size, ep_rank, config):
        torch.nn.Module.__init__(self)
        self.spec, self.ep_size, self.ep_rank = spec, ep_size, ep_rank
        self.num_experts, self.num_local_experts = spec.num_experts, spec.num_experts // ep_size
        self.expert_group_name = f"ep_size_{ep_size}"
        self.score_apply = resolve_score_apply_mode(spec, config.score_apply)
        self.layer_name, self.stages, self.ep_group, self.overlap_chunks = spec.moe_module_name, None, None, 1
        self.folding, self.checks_folding = None, config.validate_folding_routing
        self.loss_scale, self.busiest = None, 1.0
        self.statistics = LayerStatistics(self.num_experts)
        self.exp_counts = None
        self.router = self._make_router(getattr(source_module, spec.router_name))
        self.experts = self._make_experts(getattr(source_module, spec.experts_name), config)
        for name in (spec.shared_experts_name, spec.shared_experts_gate_name):
            if name:
                setattr(self, name, getattr(source_module, name))
        self.recorder = None
        if spec.router_logits_capture_target == "router":
            router = getattr(source_module, spec.router_name)
            self.spec = dataclasses.replace(spec, router_logits_capture_mode=self._capture_mode(router))
            self.recorder = _recorded_as(router, _Logits())
        elif spec.router_logits_capture_target == "moe_block":
            _recorded_as(source_module, self)

    def _make_router(self, source):
        spec, adapter = self.spec, get_preset_adapter(self.spec.preset_adapter)
        router = TokenChoiceTopKRouter(
            spec.hidden_size, spec.num_experts, spec.num_expert_groups, spec.num_limited_groups, spec.top_k,
            spec.score_func, spec.route_norm, spec.route_scale, spec.gate_bias, spec.group_score_func,
        )  # fmt: skip
        if adapter.fp32_router:
            router.gate = Fp32Linear(spec.hidden_size, spec.num_experts, bias=spec.gate_bias)
        router.gate.weight = source.weight
        if spec.gate_bias:
            router.gate.bias = source.bias
        bias = adapter.expert_bias(source) if spec.supports_expert_bias else None
        if isinstance(bias, torch.nn.Parameter):
            self.expert_bias = bias
        else:
            self.register_buffer("expert_bias", bias)
        return router

    @torch.no_grad()
    def _capture_mode(self, source):
        """The kind of logits that ``source``, the model's router, returns, found by a call: "raw" as in transformers
        5.23, or "post_score", after softmax or sigmoid, as in 5.0."""
        spec, usual = self.spec, self.spec.router_logits_capture_mode
        if source.weight.device.type == "meta":
            return usual
        token = torch.linspace(-1, 1, spec.hidden_size).to(source.weight).view(1, 1, -1)
        try:
            given = source(token)
        except (TypeError, ValueError, RuntimeError) as e:  # other arguments, other shapes: none of transformers' own
            warning_once(
                f"MoE layer '{self.layer_name}': could not call its router {type(source).__name__} with a "
                f"[1, 1, {spec.hidden_size}] tensor to find its logits ({type(e).__name__}: {e}). Recorded logits "
                f"follow the preset's router_logits_capture_mode, {usual!r}",
                key=f"router of {type(source).__name__}",
            )
            return usual
        given = given[spec.router_logits_capture_index] if isinstance(given, tuple) else given
        logits = self.router.route(token.view(1, -1), self.expert_bias).logits
        if not torch.is_tensor(given) or given.numel() != logits.numel():
            return usual
        return "raw" if torch.allclose(given.view_as(logits).float(), logits.float(), atol=1e-3) else "post_score"

    def _make_experts(self, source, config):
        spec = self.spec
        experts = GroupedExperts.of_weights(
            *repack_expert_weights(source, spec, self.ep_rank, self.ep_size),
            config.use_grouped_mm,
            config.disable_triton_grouped_mm,
        )
        weights = source_weights(source, spec)
        of_kind = list(zip(*weights, strict=True)) if spec.expert_storage == "module_list" else [[w] for w in weights]
        halves = len(of_kind) == 2 and spec.expert_storage == "fused_3d"  # w1 is both, one after the other
        taken = [(experts.w1, experts.w3) if halves else (experts.w1,), (experts.w2,), (experts.w3,)]
        for made, old in zip(taken, of_kind, strict=False):
            if old[0] is None:
                continue
            wanted = {param.requires_grad for param in old}
            if len(wanted) > 1:
                fail(self.layer_name, "some of its experts are frozen and some are not: they are one parameter now")
            for param in made:
                param.requires_grad_(old[0].requires_grad)
                if hasattr(old[0], "use_muon"):
                    param.use_muon = old[0].use_muon
            for param in old:
                param.ds_replaced_by = made
        for param in experts.parameters():
            param.allreduce = False  # not averaged over all data-parallel ranks
            param.group_name = self.expert_group_name
        return experts

    # ---- what the engine asks of a layer with experts ----------------------------------------------------------------
    @property
    def deepspeed_moe(self):
        return self

    @property
    def gate(self):
        return self.router

    @property
    def l_aux(self):
        """The model has a loss of balance of its own, if any."""
        return torch.zeros(())

    def set_name(self, name):
        """The name of the layer in messages."""
        self.layer_name = name

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_=False, folding_group_handles=None):
        """Makes the groups of ranks that share experts; every rank calls it. ``deepspeed.initialize`` does.

        ``folding_group_handles``: a ``FoldingGroupHandles`` with groups that exist. Where its spec has tensor-parallel
        ranks, each of them works on a part of the assignments.
        """
        name, handles = self.expert_group_name, folding_group_handles
        if handles is not None:
            self.ep_group, copies = handles.ep_group, handles.edp_group
            self.folding = handles if handles.spec is not None and handles.spec.tp_size > 1 else None
        else:
            if name not in groups._get_expert_parallel_group_dict():
                groups._create_expert_and_data_parallel(
                    self.ep_size, use_data_before_expert_parallel_=use_data_before_expert_parallel_
                )
            self.ep_group = groups._get_expert_parallel_group(name)
            copies = groups._get_expert_data_parallel_group(name)
        if self.ep_size == 1 and self.folding is None:
            return
        rank = dist.get_rank(self.ep_group)
        if rank != self.ep_rank:
            fail(self.layer_name, f"it has the experts of ep_rank={self.ep_rank}, and is rank {rank} of its group")
        ranks = {
            "edp": dist.get_all_ranks_from_group(copies),
            "ep": dist.get_all_ranks_from_group(self.ep_group),
        }
        rows = (self.ep_rank * self.num_local_experts, self.num_experts)
        for param in self.experts.parameters():
            param.ds_ranks = ParamRanks(f"experts.{name}", ranks, copies, rows=rows)
        if self.folding is not None:
            for param in self.router.parameters():
                mark_autoep_folding_router_parameter(param)

    # ---- forward -----------------------------------------------------------------------------------------------------
    def forward(self, hidden_states):
        """``hidden_states``: [..., hidden_size]. Returns what the model's own layer does: the output, or the output and
        the router's logits."""
        if self.ep_size > 1 and self.ep_group is None:
            fail(self.layer_name, f"ep_size={self.ep_size}, and no groups: deepspeed.initialize makes them")
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        found = self.router.route(tokens, self.expert_bias)
        if self.recorder is not None:
            post = self.spec.router_logits_capture_mode == "post_score"
            self.recorder(found.probs if post else found.logits, found.scores, found.experts)
        experts = found.experts.to(torch.int32).masked_fill(found.scores.isnan(), -2)  # a plan refuses these
        probs = found.probs.detach()  # for statistics alone: recomputation, uncounted, saves the same tensors
        if self.statistics.counting and self.spec.score_func == "sigmoid":  # what has an entropy adds up to 1
            probs = probs / probs.sum(1, keepdim=True)
        try:
            routes = Routes(experts, probs)
        except ValueError as e:
            fail(self.layer_name, f"rank {dist.get_rank() if dist.is_initialized() else 0}: {e}")
        routes.l_aux, self.exp_counts = self.l_aux, routes.exp_counts
        self.statistics.see(routes)
        dense = []  # it runs while rows travel, if they do
        output = self._through_experts(tokens, routes, found.scores, lambda: dense.append(self._shared(hidden_states)))
        flat = self.spec.moe_output_shape == "flat"
        output = output if flat else output.reshape(hidden_states.shape)
        if self.spec.has_shared_experts:
            shared = dense[0] if dense else self._shared(hidden_states)
            output = output + shared.reshape(output.shape)
        return (output, found.logits) if self.spec.return_router_logits else output

    def _shared(self, hidden_states):
        """The part that all tokens use."""
        spec = self.spec
        if not spec.has_shared_experts:
            return None
        made = getattr(self, spec.shared_experts_name)(hidden_states)
        if spec.shared_experts_gate_name:
            made = torch.sigmoid(getattr(self, spec.shared_experts_gate_name)(hidden_states)) * made
        return made

    def _through_experts(self, tokens, routes, scores, beside):
        if self.folding is None:
            return self._through_planned(tokens, routes.plan, scores, beside)
        group, size = self.folding.tp_group, self.folding.spec.tp_size
        payload = payload_of_choices(routes.experts, scores, routes.locations())
        checks = self.checks_folding and not tokens.is_meta
        if checks:
            with named(self.layer_name):
                assert_tp_payload_consistent(payload, tp_group=group, tp_size=size)
        rank = dist.get_rank(group)
        own, context = partition_assignments(payload, tp_group=group, tp_rank=rank, tp_size=size)
        plan, scores = choices_of(own, routes.experts.shape, self.num_experts)
        tokens = shared_by_ranks(tokens, group)
        combined = self._through_planned(tokens, plan, scores, beside)
        return restore_combined(combined, context, tp_group=group, validate_coverage=checks)

    def _through_planned(self, tokens, plan, scores, beside):
        sources, slots, run = exchange_of(self, plan)
        rows = dispatch_rows(tokens, sources, slots)
        if self.score_apply == "pre":
            rows = apply_scores_before_experts_if_enabled(rows, scores.reshape(-1)[sources.long()], "pre")
            scores = torch.ones_like(scores)
        return combine_rows(run(rows, self._run_experts, beside), scores.float(), sources, slots)

    def _run_experts(self, rows, counts, first=0):
        behind = self.num_local_experts - first - len(counts)
        return self.experts(with_gradient(rows, self.experts), [0] * first + list(counts) + [0] * behind)
