"""The published gating functions, which choose experts for tokens, over the native gate and plans of routes."""

import torch

from deepspeed import comm as dist
from deepspeed.moe.routes import Routes, capacity_of
from deepspeed.moe.rows import gate

NOISE = (None, "None", "Jitter", "RSample")


def multiplicative_jitter(x, device=None, epsilon=1e-2):
    """``x`` times numbers between 1 - epsilon and 1 + epsilon; ``x`` itself where epsilon is 0."""
    return x if epsilon == 0 else x * torch.empty_like(x).uniform_(1.0 - epsilon, 1.0 + epsilon)


def gumbel_rsample(shape, device):
    """Numbers of the standard Gumbel distribution: the largest of logits plus these is a sample of their softmax."""
    return -torch.empty(shape, device=device).exponential_().log()


def _scores(logits, bias, noise):
    """The scores by which experts are chosen: logits with noise and a bias of each expert; None: the logits alone."""
    scores = None if bias is None else logits.detach() + bias
    if noise != "RSample":
        return scores
    return (logits.detach() if scores is None else scores) + gumbel_rsample(logits.shape, logits.device)


def _gated(logits, k, select, used_token, capacity_factor, min_capacity, drop):
    """``(probabilities, k experts of each token, the capacity of an expert or None)``. ``used_token``: 0 for tokens
    that do not count, which get no expert."""
    probs, experts = gate(logits, k, select)
    if used_token is not None:
        unused = used_token.reshape(-1, 1).to(experts.device) == 0
        experts = experts.masked_fill(unused & (experts >= 0), -1)
    return probs, experts, capacity_of(*logits.shape, capacity_factor * k, min_capacity) if drop else None


def route_top1(logits, capacity_factor, min_capacity, used_token=None, noise=None, drop=True, bias=None, random=True):
    """One expert for each token. ``random``: a full expert keeps random tokens, else the first ones."""
    select = _scores(logits, bias, noise)
    probs, experts, capacity = _gated(logits, 1, select, used_token, capacity_factor, min_capacity, drop)
    priority = torch.rand(experts.shape, device=logits.device) if random and drop else None
    routes = Routes(experts, probs, capacity, priority)
    routes.l_aux = routes.balance_loss()
    return routes


def route_top2(
    logits, capacity_factor, min_capacity, used_token=None, noise=None, drop=True, bias=None, sample_second=True
):
    """Two experts for each token. ``sample_second``: the second one is drawn, else it is the next best."""
    select = _scores(logits, bias, noise)
    if sample_second:
        first = (logits if select is None else select).argmax(1, keepdim=True)
        select = _scores(logits, bias, "RSample").scatter(1, first, float("inf"))
    probs, experts, capacity = _gated(logits, 2, select, used_token, capacity_factor, min_capacity, drop)
    routes = Routes(experts, probs, capacity, choices_first=True, normalize=True)
    first = experts[:, 0].long()
    counts = torch.zeros(logits.shape[1] + 1, dtype=torch.int64, device=first.device)  # last: tokens without an expert
    routes.counted = counts.scatter_add_(0, torch.where(first < 0, len(counts) - 1, first), torch.ones_like(first))[:-1]
    routes.l_aux = routes.balance_loss()
    return routes


def route_topk(
    logits, k, capacity_factor, min_capacity, used_token=None, noise=None, drop=True, bias=None, policy="probs"
):
    """k experts for each token. ``policy``: an expert keeps those with the largest probability ("probs") or the first
    ones ("position")."""
    if policy not in ("probs", "position"):
        raise ValueError(f"Invalid drop_policy: {policy}; it is 'probs' or 'position'")
    select = _scores(logits, bias, noise)
    probs, experts, capacity = _gated(logits, k, select, used_token, capacity_factor, min_capacity, drop)
    by_probs = drop and policy == "probs"
    priority = probs.detach().gather(1, experts.long().clamp(min=0)) if by_probs else None
    routes = Routes(experts, probs, capacity, priority, normalize=True)
    routes.loss_scale = 1 / k
    routes.l_aux = routes.balance_loss()
    return routes


def top1gating(
    logits,
    capacity_factor,
    min_capacity,
    used_token=None,
    noisy_gate_policy=None,
    drop_tokens=True,
    use_rts=True,
    ep_group=None,
    sparse_routes=False,
    use_tutel=False,
):
    """``(l_aux, combine weights, dispatch mask, rows that each expert was chosen for)``, the second and the third
    of shape [tokens, experts, capacity]. See ``_published`` for ``sparse_routes`` and ``use_tutel``."""
    routes = route_top1(
        logits.float(), capacity_factor, min_capacity, used_token, noisy_gate_policy, drop_tokens, random=use_rts
    )
    return _published(routes, ep_group, sparse_routes or use_tutel)


def top2gating(
    logits,
    capacity_factor,
    min_capacity,
    drop_tokens=True,
    ep_group=None,
    top2_2nd_expert_sampling=True,
    sparse_routes=False,
):
    """As ``top1gating``, two experts for each token; their weights add up to 1."""
    routes = route_top2(
        logits.float(), capacity_factor, min_capacity, drop=drop_tokens, sample_second=top2_2nd_expert_sampling
    )
    return _published(routes, ep_group, sparse_routes)


def topkgating(
    logits,
    k,
    capacity_factor,
    min_capacity,
    drop_tokens=True,
    ep_group=None,
    drop_policy="probs",
    sparse_routes=False,
):
    """As ``top1gating``, k experts for each token; their weights add up to 1."""
    routes = route_topk(logits.float(), k, capacity_factor, min_capacity, drop=drop_tokens, policy=drop_policy)
    return _published(routes, ep_group, sparse_routes)


def largest_over(group, value):
    """The largest ``value`` (a tensor of one element, which may change) that a rank of ``group`` has, as an int. A
    group of one rank, or None, exchanges nothing."""
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return int(value)


def capacity_in(group, routes):
    """The capacity of ``routes``; where all tokens are kept, the rows of the busiest expert of the ranks of a group."""
    return routes.capacity if routes.capacity is not None else largest_over(group, routes.exp_counts.max().reshape(1))


def _published(routes, ep_group, sparse):
    """The tuple of the gating functions. ``sparse``: ``(l_aux, capacity, experts, [expert of each token], [its position
    there], [its weight], counts)`` with an entry for each of the k choices; expert -1: dropped."""
    capacity = capacity_in(ep_group, routes)
    if not sparse:
        return routes.l_aux, *routes.masks(capacity), routes.exp_counts
    locations = routes.locations()
    experts = routes.experts.long().masked_fill(locations < 0, -1)
    columns = [list(t.unbind(1)) for t in (experts, locations.clamp(min=0), routes.weights())]
    return routes.l_aux, capacity, routes.num_experts, *columns, routes.exp_counts
