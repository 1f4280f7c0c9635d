"""Muon for matrices, Adam for everything else.

Muon is Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; the order of operations is in
``csrc/kernels/muon.h`` and ``csrc/zero/step/newton_schulz.h``. Adam (decoupled decay) is ``csrc/kernels/adam.h``.
"""

import torch

from deepspeed.ops.muon.flags import ndim_of, uses_muon
from deepspeed.ops.muon.update import check_ns_method
from deepspeed.ops.native_optimizer import NativeOptimizer

MUON_DEFAULTS = {
    "lr": 0.02,
    "momentum": 0.95,
    "weight_decay": 0.0,
    "nesterov": True,
    "ns_steps": 5,
    "ns_method": "gram",
}
ADAM_DEFAULTS = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
# Names in arguments and parameter groups: (where they go, as what).
_OWN_LR = {"muon_lr": True, "adam_lr": False}


class MuonWithAuxAdam(NativeOptimizer):
    """Muon for the parameter groups with ``use_muon`` true, AdamW for those with ``use_muon`` false.

    A Muon parameter has two or more dimensions; the first is the rows, the others together the columns. Its update is
    the momentum, orthogonalised by a Newton-Schulz iteration and times ``sqrt(max(1, rows / columns))``; the decay is
    decoupled. Inside ZeRO whole matrices are orthogonalised at every stage, each on one rank.

    Args:
        param_groups: parameters, or parameter groups. Groups without ``use_muon`` are split in two: parameters whose
            attribute ``use_muon`` is true (where there is no such attribute: those of two or more dimensions) and the
            others.
        **defaults: ``lr``, ``weight_decay``; ``momentum``, ``nesterov``, ``ns_steps``, ``ns_method``, ``muon_lr`` (goes
            before ``lr``) of Muon's groups; ``betas``, ``eps``, ``adam_lr`` of Adam's groups. What a group says itself
            goes first. Without any of them: Muon lr 0.02, momentum 0.95, nesterov, 5 steps, "gram"; Adam lr 3e-4, betas
            (0.9, 0.95), eps 1e-10; no decay.

    Raises:
        ValueError: a hyperparameter is out of range, or a parameter of fewer than two dimensions in a Muon group.
        TypeError: an argument that neither knows.
    """

    def __init__(self, param_groups, **defaults):
        known = {*MUON_DEFAULTS, *ADAM_DEFAULTS, *_OWN_LR}
        unknown = sorted(set(defaults) - known)
        if unknown:
            raise TypeError(f"MuonWithAuxAdam has no argument {', '.join(unknown)}; it has: {', '.join(sorted(known))}")
        groups = [
            self._completed(group, defaults) for given in _as_groups(param_groups) for group in _split_group(given)
        ]
        super().__init__(groups, {"use_muon": False}, decoupled=1, bias_correction=1)

    @staticmethod
    def _completed(group, defaults):
        """A group with all hyperparameters of its kind and none of the other's."""
        muon = bool(group["use_muon"])
        known = MUON_DEFAULTS if muon else ADAM_DEFAULTS
        result = {"params": group["params"], "use_muon": muon, **known}
        for source in (defaults, group):
            result.update({key: value for key, value in source.items() if key in known})
            for key, for_muon in _OWN_LR.items():
                if for_muon == muon and source.get(key) is not None:
                    result["lr"] = source[key]
        both = {"params", "use_muon", *MUON_DEFAULTS, *ADAM_DEFAULTS, *_OWN_LR}
        result.update({key: value for key, value in group.items() if key not in both})
        return result

    def rule_of(self, group):
        return "muon" if group["use_muon"] else "adam"

    def rule_args(self, group):
        args = super().rule_args(group)
        if group["use_muon"]:
            args["gram"] = float(group["ns_method"] == "gram")
        return args

    def magnification(self, group):
        """Each step of the iteration multiplies the smallest singular values by 3.4445."""
        return 3.4445 ** group["ns_steps"] if group["use_muon"] else 1.0

    def _check_group(self, group):
        if group["use_muon"]:
            check_ns_method(group["ns_method"])
            if not 0 <= group["momentum"] < 1:
                raise ValueError(f"Muon: momentum must be at least 0 and below 1, got {group['momentum']}.")
            if int(group["ns_steps"]) != group["ns_steps"] or group["ns_steps"] < 1:
                raise ValueError(f"Muon: ns_steps must be a whole number of at least 1, got {group['ns_steps']}.")
            for param in group["params"]:
                if ndim_of(param) < 2:
                    shape = tuple(getattr(param, "ds_shape", param.shape))
                    raise ValueError(
                        f"Muon updates matrices, but a parameter of shape {shape} is in a group with use_muon=True. "
                        "Put it into a group with use_muon=False (Adam), or set its attribute use_muon to False."
                    )
        super()._check_group(group)

    def add_param_group(self, param_group):
        """Add a group; without ``use_muon`` it is split like those of the constructor."""
        for group in _split_group(dict(param_group)):
            super().add_param_group(self._completed(group, {}))


def _as_groups(given):
    given = [given] if isinstance(given, torch.Tensor) else list(given)
    if not given:
        raise ValueError("MuonWithAuxAdam got no parameters.")
    return given if isinstance(given[0], dict) else [{"params": given}]


def _split_group(group):
    """The group itself where it says ``use_muon``, else one for Muon and one for Adam, empty ones left out."""
    params = group["params"]
    params = [params] if isinstance(params, torch.Tensor) else list(params)
    if "use_muon" in group:
        return [{**group, "params": params}]
    kinds = {use: [param for param in params if uses_muon(param) == use] for use in (True, False)}
    return [{**group, "params": own, "use_muon": use} for use, own in kinds.items() if own]
