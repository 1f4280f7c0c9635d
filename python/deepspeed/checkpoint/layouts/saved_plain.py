"""The layout without ZeRO: whole weights in the model file, and one optimizer state that every rank has."""

import torch

from deepspeed.checkpoint.layouts.saved_flat import type_of_step
from deepspeed.checkpoint.layouts.saved_state import Range, SavedState
from deepspeed.zero.flat_layout import per_element


class PlainState(SavedState):
    """``optimizer``: what the optimizer's ``state_dict`` gave, of a torch optimizer or of the 16-bit wrapper around one
    (states of a group flat, or parameter by parameter); None without one. ``names``: the parameters of each group,
    which the files do not say, and ``shapes`` name -> shape. ``steps_are_real``: False for files in which only the last
    parameter of a group counts updates.
    """

    zero_stage = 0

    def __init__(self, optimizer, names, shapes, model=None, folder=None, steps_are_real=True):
        super().__init__()
        self.folder, self.model = folder, model or {}
        self.dp_world_size = self.model.get("dp_world_size", 1)
        self._wrapped = optimizer or {}
        self._inner = self._wrapped.get("optimizer_state_dict", self._wrapped)
        self._flat = self._wrapped.get("fp32_groups_flat")
        self._separate = self._wrapped.get("fp32_groups")
        self._steps_are_real = steps_are_real
        groups = self._inner.get("param_groups")
        if groups is not None and len(groups) != len(names):
            raise ValueError(
                f"{self.origin()} has {len(groups)} parameter groups, this run's optimizer has {len(names)}: make the "
                "same groups, or load it with load_optimizer_states=False"
            )
        self._groups = [{name: torch.Size(shapes[name]) for name in group} for group in names]
        self._shapes = {name: shape for group in self._groups for name, shape in group.items()}
        self._places = {}  # name -> (group, index in the group, offset in the group)
        for number, group in enumerate(self._groups):
            offset = 0
            for index, (name, shape) in enumerate(group.items()):
                self._places[name] = (number, index, offset)
                offset += shape.numel()
            self._check(number, len(group), offset)

    def _check(self, group, count, total):
        saved = self._inner.get("param_groups")
        have = len(saved[group]["params"]) if saved is not None else count
        if self._flat is not None and self._flat[group].numel() != total:
            raise ValueError(
                f"{self.origin()}: group {group} has {self._flat[group].numel()} elements saved, the model has "
                f"{total}; it is of another model. Load it with load_optimizer_states=False, or with the model it is of"
            )
        if self._flat is None and have != count:
            raise ValueError(
                f"{self.origin()}: group {group} has {have} parameters saved, the model has {count}; it is of another "
                "model. Load it with load_optimizer_states=False, or with the model it is of"
            )

    def shapes(self):
        return self._shapes

    def _state(self, name):
        group, index, _ = self._places[name]
        groups = self._inner.get("param_groups")
        if groups is None:
            return {}
        keys = groups[group]["params"]
        return (self._inner.get("state") or {}).get(keys[0 if self._flat is not None else index], {})

    def param_groups(self):
        saved = self._inner.get("param_groups") or [{} for _ in self._groups]
        return [
            {**{key: value for key, value in group.items() if key != "params"}, "names": list(names)}
            for group, names in zip(saved, self._groups)
        ]

    def state_names(self):
        found = []
        for name in self._places:
            found += [key for key, value in self._state(name).items() if self._whole(name, value) and key not in found]
        return found

    def _whole(self, name, value):
        """Whether a state has a value for each element; some optimizers keep rows and columns, or counts."""
        if self._flat is not None:
            return per_element(value)
        return per_element(value) and tuple(value.shape) == tuple(self.shapes()[name])

    def scalars(self, name):
        state = self._state(name)
        group, index, _ = self._places[name]
        found = {key: value for key, value in state.items() if not self._whole(name, value) and key != "param_steps"}
        if "param_steps" in state:
            found["step"] = type_of_step(found.get("step"), state["param_steps"][index])
        elif not self._steps_are_real and isinstance(found.get("step"), int):
            found["step"] = max(self._state(other).get("step", 0) for other in self._groups[group])
        return found

    def state_pieces(self, name, kind):
        group, index, offset = self._places[name]
        numel = self._groups[group][name].numel()
        flat = self._flat is not None
        if kind == "fp32" and flat:
            tensor = self._flat[group]
        elif kind == "fp32" and self._separate is not None:
            tensor = self._separate[group][index]
        elif kind == "fp32":
            tensor = (self.model.get("module") or {}).get(name)
            tensor = tensor if tensor is not None and tensor.dtype == torch.float32 else None
        else:
            tensor = self._state(name).get(kind)
            tensor = tensor if self._whole(name, tensor) else None
        if tensor is None or numel == 0:
            return []
        return [(0, numel, Range(tensor, offset if flat else 0))]

    def extra(self):
        keys = ("dynamic_loss_scale", "overflow", "clip_grad")
        found = {key: self._wrapped[key] for key in keys if key in self._wrapped}
        if "cur_scale" in self._wrapped:
            scaler = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window", "cur_hysteresis")
            found["loss_scaler"] = {key: self._wrapped[key] for key in scaler if key in self._wrapped}
        return found
