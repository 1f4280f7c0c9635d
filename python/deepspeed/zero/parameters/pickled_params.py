"""Parameters of a trained model, pickled: their values and what the user has put on them, and nothing of an engine.

From torch 2.0 on a pickled parameter has its attributes. Some of those that an engine gives it cannot be pickled
(process groups), and none means anything without the engine.
"""

import copyreg

import torch

_OF_ENGINES = ("_hp_mapping", "_dp_group", "load_hp_checkpoint_state")


def _reduced(param):
    rebuild, args, *rest = param.__reduce_ex__(2)
    if len(args) != 4 or not isinstance(args[3], dict):  # torch 1.13 has no attributes there
        return (rebuild, args, *rest)
    kept = {key: value for key, value in args[3].items() if key not in _OF_ENGINES and not key.startswith("_ds_")}
    return (rebuild, (*args[:3], kept), *rest) if kept else (torch._utils._rebuild_parameter, args[:3])


copyreg.pickle(torch.nn.Parameter, _reduced)
