"""Parameters with ranks of their own: some ranks train one, others train another in its place (experts)."""


class ParamRanks:
    """Which ranks train a parameter: its attribute ``ds_ranks``, set on every rank before ``deepspeed.initialize``.

    ``rule`` is the name of a rule of the core (csrc/zero/space_rules/), ``groups`` maps the names that the rule asks
    for to torch's process groups; names mean the same for all such parameters of a model. ``copies`` is the group of
    those that train the same parameter: its first rank's values are what all start from.
    """

    def __init__(self, rule, groups, copies):
        self.rule, self.groups, self.copies = rule, groups, copies


def ranks_of(param):
    """The ``ParamRanks`` of a parameter; None for one that all data-parallel ranks train."""
    return getattr(param, "ds_ranks", None)


def groups_of(params):
    """The groups of all parameters by name, for the core. ValueError where two mean different ranks by one name."""
    found = {}
    for param in params:
        for name, group in ranks_of(param).groups.items() if ranks_of(param) is not None else ():
            if found.setdefault(name, group) is not group:
                raise ValueError(f"two parameters mean different groups by the name {name!r} in their ds_ranks")
    return found


def refuse_own_ranks(module, what):
    """NotImplementedError for a model with parameters that not all data-parallel ranks train."""
    for name, param in module.named_parameters():
        if ranks_of(param) is not None:
            raise NotImplementedError(
                f"{what}: parameter '{name}' has ranks of its own (ds_ranks, rule '{ranks_of(param).rule}'), and files "
                "have a place only for parameters that all data-parallel ranks train. Save it yourself: "
                "deepspeed.utils.safe_get_full_fp32_param and safe_get_full_optimizer_state return its values"
            )
