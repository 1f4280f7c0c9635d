"""A module's own parameters that gather themselves when the module looks them up while it runs."""

import collections

from deepspeed.zero.parameters.sharded_parameter import ReleasedParameter


class ZeROOrderedDict(collections.OrderedDict):
    """Stands for ``module._parameters`` of ``parent_module``.

    Looking up a released parameter inside a call of the model gathers it for that call and its backward; from the next
    call on it comes with the running module's own. Elsewhere the parameter is as it is. A copy is a plain dict.
    """

    def __init__(self, parent_module, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._parent_module = parent_module

    def __getitem__(self, key):
        param = super().__getitem__(key)
        if isinstance(param, ReleasedParameter):
            param.ds_access.gatherer.touch(param.ds_handle)
        return param

    def __reduce__(self):
        return (collections.OrderedDict, (list(self.items()),))


def ensure_zero_ordered_dict(module):
    """Makes ``module._parameters`` a ``ZeROOrderedDict`` where it is not one yet."""
    if not isinstance(module._parameters, ZeROOrderedDict):
        module.__dict__["_parameters"] = ZeROOrderedDict(module, module._parameters)
