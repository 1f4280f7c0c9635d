"""The gate and the layer behind ``deepspeed.moe.layer.MoE``, under the published import path.

A forward: the gate chooses the experts of each token (``Routes``); rows are made of tokens, sent to the ranks with the
experts, run through them, sent back, and added up, times their weights. With ``drop_tokens`` an expert takes
``capacity`` rows of each rank, and messages are padded to that (``_AllToAll``). Without it exactly the chosen rows are
sent (``exchange.TokenDispatcher``), and experts run as one grouped product.
"""

import copy
from functools import partial

import torch
from torch.nn import functional as F

from deepspeed import comm as dist
from deepspeed._compat import without_autocast
from deepspeed.log import warning_once
from deepspeed.moe.errors import fail
from deepspeed.moe.exchange import PaddedTokenDispatcher, _AllToAll, exchange_of, named, with_gradient
from deepspeed.moe.gating import (  # noqa: F401
    NOISE,
    capacity_in,
    gumbel_rsample,
    largest_over,
    multiplicative_jitter,
    route_top1,
    route_top2,
    route_topk,
    top1gating,
    top2gating,
    topkgating,
)
from deepspeed.moe.mappings import drop_tokens, gather_tokens, tensor_ranks
from deepspeed.moe.routes import Routes, capacity_of
from deepspeed.moe.rows import add_loss, combine_rows, dispatch_rows
from deepspeed.moe.statistics import LayerStatistics
from deepspeed.ops.half_products import add_in_fp32
from deepspeed.ops.token_rows import positions_of
from deepspeed.utils import groups

_OWN_EXCHANGE = _AllToAll
TUTEL_INSTALLED = False  # routing is done by kernels of our own


def einsum(rule, a, b):
    """``torch.einsum`` of two tensors, which adds in fp32 on the CPU."""
    return add_in_fp32(partial(torch.einsum, rule), a, b)


def _capacity(gates, capacity_factor, min_capacity):
    """Rows that an expert takes of ``gates`` [tokens, experts], as a tensor."""
    tokens, experts = gates.shape
    return torch.tensor(capacity_of(tokens, experts, round(float(capacity_factor), 6), int(min_capacity)))


def _route_slots(indices, locations, num_experts, capacity):
    """The row ``expert * capacity + location`` of each choice; -1 for one that was dropped: no expert, or no row left.

    ``indices`` and ``locations`` are what ``sparse_routes`` of the gating functions gives, a list of tensors [tokens]
    for each choice or one tensor; so is the result.
    """
    if not torch.is_tensor(indices):
        pairs = zip(indices, locations, strict=True)
        return [_route_slots(*pair, num_experts, capacity) for pair in pairs]
    kept = (indices >= 0) & (indices < num_experts) & (locations >= 0) & (locations < capacity)
    return torch.where(kept, indices * capacity + locations, torch.full_like(indices, -1))


def _stacked(choices):
    """[tokens, k] of a list of [tokens]."""
    if not torch.is_tensor(choices):
        return torch.stack(list(choices), dim=1)
    return choices.unsqueeze(1) if choices.dim() == 1 else choices


def _sparse_encode(reshaped_input, slots, num_experts, capacity):
    """Tokens [tokens, width] in the rows of their experts: [experts, capacity, width], zeros where there is none."""
    slots = _stacked(slots)
    return dispatch_rows(reshaped_input, positions_of(slots, num_experts * capacity), slots.to(torch.int32)).reshape(
        num_experts, capacity, -1
    )


def _sparse_decode(expert_output, slots, gates, num_tokens):
    """For each of ``num_tokens`` tokens the sum of its rows of ``expert_output``, times ``gates``."""
    slots, rows = _stacked(slots), expert_output.reshape(-1, expert_output.shape[-1])
    weights = _stacked(gates)
    return combine_rows(rows, weights, positions_of(slots, len(rows)), slots.to(torch.int32))[:num_tokens]


class TopKGate(torch.nn.Module):
    """Chooses for each token the ``k`` experts with the largest outputs of ``wg``, in fp32.

    Noise, and the random choice of the tokens that a full expert keeps (``use_rts``, k = 1), are for training only: in
    evaluation equal tokens get equal experts.

    ``balance``: "aux", by the auxiliary loss, or "bias": each expert has a bias that counts only in the choice of
    experts, the engine moves it after each step (``move_bias``), and there is no auxiliary loss.
    ``aux_scope``: the loss is computed from tokens of this "rank", or of all data-parallel ranks, "batch".
    ``z_loss_coeff``: factor of the mean squared log of the softmax's denominator in the loss, which keeps logits
    small.
    """

    def __init__(
        self,
        model_dim,
        num_experts,
        k=1,
        capacity_factor=1.0,
        eval_capacity_factor=1.0,
        min_capacity=8,
        noisy_gate_policy=None,
        drop_tokens=True,
        use_rts=True,
        ep_group=None,
        top2_2nd_expert_sampling=True,
        balance="aux",
        aux_scope="rank",
        z_loss_coeff=0.0,
    ):
        super().__init__()
        if balance not in ("aux", "bias"):
            fail("", f"balance={balance!r}: it is 'aux' or 'bias'")
        if aux_scope not in ("rank", "batch"):
            fail("", f"aux_scope={aux_scope!r}: it is 'rank' or 'batch'")
        if not 1 <= k <= num_experts:
            fail("", f"k={k}: a token goes to at least one and at most all num_experts={num_experts} experts")
        self.wg = torch.nn.Linear(model_dim, num_experts, bias=False)
        self.ep_group = ep_group
        self.batch_group = None  # the ranks that see the tokens of one batch
        self.k, self.top2_2nd_expert_sampling = k, top2_2nd_expert_sampling
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.min_capacity, self.drop_tokens, self.use_rts = min_capacity, drop_tokens, use_rts
        self.noisy_gate_policy = noisy_gate_policy
        self.balance, self.aux_scope, self.z_loss_coeff = balance, aux_scope, z_loss_coeff
        self.register_buffer("expert_bias", torch.zeros(num_experts) if balance == "bias" else None)

    def _set_ep_group(self, ep_group):
        self.ep_group = ep_group

    def forward(self, input, used_token=None, use_tutel=False):
        """``(l_aux, combine weights, dispatch mask, counts)`` as the gating functions give them."""
        routes = self.route(input, used_token)
        return routes.l_aux, *routes.masks(capacity_in(self.ep_group, routes)), routes.exp_counts

    def route(self, input, used_token=None):
        """The ``Routes`` of tokens [tokens, model_dim]. ``used_token`` [tokens]: 0 for tokens that get no expert."""
        noise = self.noisy_gate_policy if self.training else None
        x = input.float()
        if noise == "Jitter":
            x = multiplicative_jitter(x, device=input.device)
        with without_autocast(input.device.type):
            logits = F.linear(x, self.wg.weight.float())
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        bias = None if self.expert_bias is None else self.expert_bias.float()
        common = (factor, self.min_capacity, used_token, noise, self.drop_tokens, bias)
        if self.k == 1:
            routes = route_top1(logits, *common, random=self.use_rts and self.training)
        elif self.k == 2:
            routes = route_top2(logits, *common, sample_second=self.top2_2nd_expert_sampling and self.training)
        else:
            routes = route_topk(logits, self.k, *common)
        routes.l_aux = self._loss(routes, logits)
        return routes

    def _loss(self, routes, logits):
        loss = routes.l_aux
        if self.balance == "bias":
            loss = logits.new_zeros(())
        elif self.aux_scope == "batch" and self.training and dist.is_initialized():
            group = self.batch_group if self.batch_group is not None else groups.get_data_parallel_group()
            loss = routes.balance_loss(group)
        if self.z_loss_coeff:
            loss = loss + self.z_loss_coeff * torch.logsumexp(logits, 1).square().sum() / max(len(logits), 1)
        return loss

    @torch.no_grad()
    def move_bias(self, counts, rate):
        """Experts that more tokens than the mean have chosen become less likely, the others more. ``counts``: rows of
        each expert over all ranks."""
        counts = torch.as_tensor(counts, dtype=torch.float32, device=self.expert_bias.device)
        self.expert_bias += (rate * torch.sign(counts.mean() - counts)).to(self.expert_bias.dtype)


class MOELayer(torch.nn.Module):
    """A gate and experts. Afterwards ``l_aux`` and ``exp_counts`` are those of the last forward.

    ``gate``: a ``TopKGate``, or a module that returns ``(l_aux, combine weights, dispatch mask, counts)``.
    ``_set_ep_group`` gives the ranks with the other experts. ``overlap_chunks``: see ``exchange.TokenDispatcher``.
    """

    def __init__(self, gate, experts, ep_group_name, ep_size, num_local_experts, use_tutel=False):
        super().__init__()
        self.gate, self.experts = gate, experts
        self.ep_group, self.ep_size, self.ep_group_name = None, ep_size, ep_group_name
        self.num_local_experts = num_local_experts
        self.layer_name = ""
        self.overlap_chunks = 1
        self.busiest = 1.0  # in plans; see ``exchange.TokenDispatcher``
        self.loss_scale = None  # a function, where the gradient of ``l_aux`` times what it returns is added here
        self.statistics = LayerStatistics(ep_size * num_local_experts)
        self.l_aux = torch.tensor(0.0)
        self.exp_counts = None
        self.use_tutel = use_tutel and TUTEL_INSTALLED and getattr(gate, "k", 1) == 1
        if use_tutel and not TUTEL_INSTALLED:
            warning_once("use_tutel=True: Tutel is not used; tokens are routed by kernels of this library")

    def _set_ep_group(self, ep_group):
        self.ep_group = ep_group
        if hasattr(self.gate, "_set_ep_group"):
            self.gate._set_ep_group(ep_group)

    def set_name(self, name):
        """Sets the name of the layer for messages."""
        self.layer_name = self.experts.layer_name = name

    def forward(self, *input, beside=None, **kwargs):
        """``input``: hidden states, and a mask of the tokens that count. ``beside`` is called during an exchange, if
        there is one."""
        hidden = input[0]
        tokens = hidden.reshape(-1, hidden.shape[-1])
        if self.ep_size > 1 and self.ep_group is None:
            fail(self.layer_name, f"ep_size={self.ep_size}, and no groups: deepspeed.initialize makes them")
        try:
            if not hasattr(self.gate, "route"):
                return self._by_masks(hidden, tokens, *self.gate(tokens, *input[1:], **kwargs))
            routes = self.gate.route(tokens, *input[1:], **kwargs)
        except ValueError as e:
            if isinstance(e, AssertionError):
                raise
            fail(self.layer_name, f"rank {dist.get_rank() if dist.is_initialized() else 0}: {e}")
        self.l_aux, self.exp_counts = routes.l_aux, routes.exp_counts
        self.statistics.see(routes)
        keep_all = routes.capacity is None and not self._parts_tokens()
        combined = (self._keep_all if keep_all else self._keep_some)(tokens, routes, beside)
        if self.loss_scale is not None and combined.requires_grad:
            combined = add_loss(combined, routes.l_aux, self.loss_scale)
        return combined.reshape(hidden.shape)

    def __deepcopy__(self, memo):
        """Groups of ranks are shared; the loss of the last forward comes without its graph."""
        memo[id(self.ep_group)], memo[id(self.l_aux)] = self.ep_group, self.l_aux.detach()
        batch_group = getattr(self.gate, "batch_group", None)
        memo[id(batch_group)] = batch_group
        made = memo[id(self)] = self.__class__.__new__(self.__class__)
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _parts_tokens(self):
        """Whether tensor-parallel ranks, which have the same tokens, share the work on them."""
        return self.ep_size > 1 and tensor_ranks() > 1 and groups._get_expert_model_parallel_world_size() == 1

    def _keep_all(self, tokens, routes, beside):
        sources, slots, run = exchange_of(self, routes.plan)
        rows = run(dispatch_rows(tokens, sources, slots), self._run_experts, beside or (lambda: None))
        return combine_rows(rows, routes.weights(), sources, slots)

    def _run_experts(self, rows, *which):
        return self.experts(with_gradient(rows, self.experts), *which)

    def _keep_some(self, tokens, routes, beside):
        capacity = self._common_capacity(routes)
        sources, slots = routes.plan.sources(capacity), routes.plan.slots(capacity)
        rows = dispatch_rows(tokens, sources, slots).reshape(routes.num_experts, capacity, -1)
        rows = self._through_experts(rows, beside).reshape(len(sources), -1)
        return combine_rows(rows, routes.weights(), sources, slots)

    def _common_capacity(self, routes):
        """The rows that the busiest expert of all ranks may take, or has if all tokens are kept. Asynchronous devices
        exchange nothing, which would make the host wait: there all ranks must have the same number of tokens."""
        known, on_host = routes.capacity, routes.probs.device.type == "cpu"
        if known is not None and not (self.ep_size > 1 and on_host):
            return known
        largest = routes.exp_counts.max().reshape(1) if known is None else torch.tensor([known])
        with named(self.layer_name):
            return largest_over(self.ep_group if self.ep_size > 1 else None, largest)

    def _through_experts(self, rows, beside=None):
        """Sends [experts, capacity, width] to the ranks with the experts, and back."""
        width, capacity = rows.shape[-1], rows.shape[1]
        split = self._parts_tokens()
        with named(self.layer_name):
            if split:
                rows = drop_tokens(F.pad(rows, (0, 0, 0, -capacity % tensor_ranks())), dim=1)
            chunks = min(self.overlap_chunks, self.num_local_experts)
            if chunks > 1 and self.ep_size > 1 and _AllToAll is _OWN_EXCHANGE:  # not a replacement by a client
                dispatcher = PaddedTokenDispatcher(
                    self.ep_group, self.num_local_experts, self.statistics, self.layer_name, chunks
                )
                parts = rows.reshape(self.ep_size, self.num_local_experts, -1, width)
                rows = dispatcher.run(parts, self._run_experts, beside or (lambda: None)).flatten(0, 1)
            else:
                crossing = rows.numel() * rows.element_size() * (self.ep_size - 1) // self.ep_size
                both_ways = 4 if torch.is_grad_enabled() else 2  # with the gradients
                self.statistics.see_bytes(crossing * both_ways)
                rows = _AllToAll.apply(self.ep_group, rows)
                rows = self._run_experts(rows.reshape(self.ep_size, self.num_local_experts, -1, width))
                rows = _AllToAll.apply(self.ep_group, rows).reshape(self.ep_size * self.num_local_experts, -1, width)
            return gather_tokens(rows, dim=1)[:, :capacity] if split else rows

    def _by_masks(self, hidden, tokens, l_aux, combine, dispatch, counts):
        """A forward with a gate that is not ours, by its masks."""
        self.l_aux, self.exp_counts = l_aux, counts
        rows = einsum("sec,sm->ecm", dispatch.type_as(tokens), tokens)
        rows = self._through_experts(rows)
        return einsum("sec,ecm->sm", combine.type_as(tokens), rows).reshape(hidden.shape)


__all__ = [
    "TUTEL_INSTALLED", "MOELayer", "NOISE", "Routes", "TopKGate", "einsum", "gumbel_rsample", "multiplicative_jitter",
    "top1gating", "top2gating", "topkgating",
]  # fmt: skip
