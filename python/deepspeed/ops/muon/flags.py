"""The attribute ``use_muon`` of a parameter, which says whether Muon updates it."""

MUON = "muon"


def ndim_of(param):
    """Dimensions of the whole parameter, sharded or not."""
    return len(getattr(param, "ds_shape", param.shape))


def uses_muon(param):
    """``param.use_muon`` where it is set, else whether the parameter is a matrix or has more dimensions."""
    flag = getattr(param, "use_muon", None)
    return ndim_of(param) >= 2 if flag is None else bool(flag)


def set_optimizer_flags(config_class, model):
    """Marks the parameters of ``model`` for the optimizer of the configuration.

    For Muon every parameter gets ``use_muon``: true for those of two or more dimensions whose name contains neither
    ``embed`` nor ``lm_head``. Flags that are there already stay.
    """
    for name, param in model.named_parameters() if config_class.optimizer_name == MUON else ():
        if getattr(param, "use_muon", None) is None:
            lower = name.lower()
            param.use_muon = ndim_of(param) >= 2 and "embed" not in lower and "lm_head" not in lower
