"""``explain``: the table of a cut as text, before anything is cut."""

from deepspeed.config import DeepSpeedConfig
from deepspeed.config.errors import config_error
from deepspeed.config.getters import load_ds_config
from deepspeed.config.sections import TPTrainingConfig
from deepspeed.module_inject.auto_ep_config import parse_autoep_config
from deepspeed.module_inject.block_twin import keep_whole
from deepspeed.module_inject.cut_group import grained_runs
from deepspeed.module_inject.cut_plan import cuts_of, plan_of
from deepspeed.module_inject.expert_cuts import parts_with_experts


def explain(model, config):
    """Prints and returns how ``model`` is cut for training: a line for each parameter that is cut of one block of each
    kind, with its dimension and the elements of each rank; layers that stay whole with the reason; bytes of weights on
    a rank; all-reduces of a block. No rank but this one is needed, and the model does not change.

    Args:
        config: a dict, a path or base64 of JSON with a section ``tensor_parallel``, or a ``DeepSpeedConfig``.

    ValueError where ``tensor_parallel.autotp_size`` is below 2.
    """
    given = config._param_dict if isinstance(config, DeepSpeedConfig) else load_ds_config(config)
    if isinstance(config, DeepSpeedConfig):
        section = config.tensor_parallel_config
    else:
        section = TPTrainingConfig(**given.get("tensor_parallel", {}))
    ranks = section.autotp_size
    if ranks < 2:
        raise config_error(
            f"explain: tensor_parallel.autotp_size is {ranks}, so nothing is cut: set it to the number of ranks that "
            "share the layers",
            ["tensor_parallel.autotp_size"],
        )
    experts = given.get("expert_parallel") or {}
    parts = parts_with_experts(model, parse_autoep_config(experts) if experts.get("enabled") else None)
    for _, part, _ in parts:
        keep_whole(part)
    try:
        plan = plan_of(model, ranks, section)
    finally:
        for _, part, _ in parts:
            keep_whole(part, False)
    lines = [f"{type(model).__name__} over {ranks} ranks, as {plan.source.name} says"]
    for name, one in plan.kinds().items():
        block = model.get_submodule(name)
        alike = sum(other is one for other in plan.blocks.values())
        lines.append(f"{name or 'the model'} ({type(block).__name__}, {alike} alike):")
        for param, (dim, cut) in cuts_of(block, one, ranks).items():
            widths = [cut.width(rank) for rank in range(ranks)]
            copies = ", some on several ranks" if cut.copied() else ""
            lines.append(f"  {param}: dimension {dim}, {cut.size()} elements are {widths}{copies}")
        lines += [f"  {param}: whole, its gradient is summed" for group in one.groups for param in group.partial]
        lines += [f"  {layer}: cut by a rule, {spec.partition_type.value}" for layer, spec in one.ruled.items()]
        lines += [f"  {layer}: whole, {reason}" for layer, reason in one.whole.items()]
        rows, reads = len(_rows(one)), sum(group.reads for group in one.groups)
        if plan.split:
            lines.append(
                f"  reduce-scatters: {rows} forward, {reads} backward; all-gathers: {reads} forward, {rows} backward"
            )
        else:
            lines.append(f"  all-reduces: {rows} forward, {reads} backward")
    lines += [f"{layer}: cut by a rule, {spec.partition_type.value}" for layer, spec in plan.outside.items()]
    if plan.vocabulary is not None:
        lines += [f"{layer}: cut over {plan.vocabulary.words} words" for layer in plan.vocabulary.layers]
    lines += [f"{layer}: whole, {reason}" for layer, reason in plan.kept.items()]
    lines += [f"{name}: of a layer with experts, {share:.3g} of its weights on a rank" for name, _, share in parts]
    shares = {f"{name}.": share for name, _, share in parts}
    lines += [f"rank {rank}: {bytes_of(model, plan, rank, shares):,} bytes of weights" for rank in range(ranks)]
    text = "\n".join(lines)
    print(text)
    return text


def _rows(plan):
    return [row for group in plan.groups for row in group.rows]


def bytes_of(model, plan, rank, shares=None):
    """Bytes of a model's weights on a rank. Layers that a rule cuts count an equal share; ``shares``: begin of names ->
    share of the weights that have such a name; None: no layer has experts."""
    cuts = {
        f"{name}.{param}".lstrip("."): cut.width(rank) / cut.size()
        for name, one in plan.blocks.items()
        for param, (_, cut) in cuts_of(model.get_submodule(name), one, plan.ranks).items()
    }
    ruled = [f"{name}.{layer}.".lstrip(".") for name, one in plan.blocks.items() for layer in one.ruled]
    ruled = (*ruled, *(f"{layer}." for layer in plan.outside))
    if plan.vocabulary is not None:
        start, stop = grained_runs(plan.vocabulary.words, plan.ranks, 1)[rank]
        share = (stop - start) / plan.vocabulary.words
        cuts.update({f"{layer}.{last}": share for layer in plan.vocabulary.layers for last in ("weight", "bias")})
    shares = shares or {}
    total, others = 0, tuple(shares)
    for name, param in model.named_parameters():
        whole = getattr(param, "ds_numel", param.numel()) * param.element_size()
        if name.startswith(others):
            total += round(whole * next(share for begin, share in shares.items() if name.startswith(begin)))
            continue
        total += round(whole * cuts.get(name, 1 / plan.ranks if ruled and name.startswith(ruled) else 1))
    return total
