"""Makes sure that models whose sequences ranks share get the positions of their part."""

import inspect
import weakref

from deepspeed._compat import forward_hooks_take_kwargs


def demand(model, shares):
    """``model`` raises a ValueError where it is called without ``position_ids`` that it takes, while ``shares(model)``:
    left alone it numbers its part as if that were the whole sequence. (torch 1.13 cannot ask.)"""
    signature, own = inspect.signature(model.forward), weakref.ref(model)
    if "position_ids" not in signature.parameters or not forward_hooks_take_kwargs():
        return

    def check(module, args, kwargs):
        given = signature.bind_partial(*args, **kwargs).arguments.get("position_ids")
        if given is None and module is own() and shares(module):  # copies of the module belong to other models
            raise ValueError(
                f"{type(module).__name__} was called without position_ids: ranks share its sequences, and each would "
                "number its part from 0. Pass the position_ids of the whole sequence, cut as the tokens are "
                "(UlyssesSPDataLoaderAdapter does so)"
            )

    model.register_forward_pre_hook(check, with_kwargs=True)
