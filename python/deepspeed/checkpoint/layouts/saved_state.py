"""The content of a checkpoint of any layout, ZeRO stage and number of ranks: the base class of all layouts.

Its users ask for ranges of one parameter and do not know how the files are cut.
"""

import torch


class Range:
    """Elements of ``source``, counted from ``base`` on: of a tensor, of whatever has ``read_range(start, numel)``, or
    of what a function without arguments gives, called when elements are wanted: files stay closed till then."""

    def __init__(self, source, base=0):
        self.source = source
        self.base = base

    def read_range(self, start, numel):
        """``numel`` elements from ``start`` on, a 1-D tensor in row-major order; may share memory with the source.
        IndexError outside of it."""
        source = self.source() if callable(self.source) else self.source
        if torch.is_tensor(source):
            if self.base + start + numel > source.numel():
                raise IndexError(
                    f"elements {self.base + start} to {self.base + start + numel} of a tensor of {source.numel()} "
                    "elements"
                )
            return source.detach().reshape(-1)[self.base + start : self.base + start + numel]
        return source.read_range(self.base + start, numel)

    def fill(self, target, start):
        """Reads the elements from ``start`` on straight into ``target``, 1-D; False where the source cannot."""
        source = self.source() if callable(self.source) else self.source
        return hasattr(source, "fill") and source.fill(target, self.base + start)


class SavedState:
    """One checkpoint. Parameters are known by their names in the module; tied ones by the first of their names.

    folder:        where it lies; None in memory.
    zero_stage:    of the run that saved it.
    dp_world_size: data-parallel ranks that saved it.
    model:         the model file: dict; tensors may be lazy (``read()``, ``read_range(start, numel)``).
    masters_only:  weights of trained parameters are saved as fp32 masters only.
    """

    folder = None
    zero_stage = 0
    dp_world_size = 1
    masters_only = False

    def __init__(self):
        self.model = {}

    # ---- what a layout must say ------------------------------------------------------------------------------------
    def shapes(self):
        """dict: name of a trained parameter -> its torch.Size, end to end over the parameter groups."""
        raise NotImplementedError

    def param_groups(self):
        """One dict of hyperparameters for each parameter group of the optimizer; its ``names`` are the parameters'."""
        raise NotImplementedError

    def state_names(self):
        """Names of optimizer states that have a value for each element of a parameter, e.g. ``exp_avg``."""
        raise NotImplementedError

    def scalars(self, name):
        """dict of a parameter's other states: ``step``, a number or a tensor of one element, and the like."""
        raise NotImplementedError

    def state_pieces(self, name, kind):
        """As ``pieces`` for ``kind`` "fp32" or the name of a state of a trained parameter."""
        raise NotImplementedError

    def has_optimizer(self):
        """Whether there are optimizer states at all."""
        return bool(self.param_groups())

    def extra(self):
        """Saved values of the optimizer as a whole: ``loss_scaler`` (an object or a dict of its attributes),
        ``dynamic_loss_scale``, ``overflow``, ``clip_grad``, as far as they were saved."""
        return {}

    def run_states(self, rank):
        """``(the state with which rank rank resumes, whether it saved that itself)``; None if other files have it."""
        return None

    # ---- what follows from it --------------------------------------------------------------------------------------
    def module(self):
        """dict: name -> tensor or lazy tensor of the module's state that the checkpoint has whole, aliases included."""
        return {
            name: value
            for name, value in (self.model.get("module") or {}).items()
            if not (name in self._cut() and _numel(value) == 0)
        }

    def _cut(self):
        """Names of parameters of which the model file has placeholders."""
        return ()

    def aliases(self):
        """dict: alias -> name, for tied parameters."""
        return dict(self.model.get("shared_params") or {})

    def step(self, name):
        """Updates that a parameter has seen, or None where that was not saved."""
        step = eager(self.scalars(name).get("step"))
        return None if step is None else int(step.item() if torch.is_tensor(step) else step)

    def pieces(self, name, kind):
        """``[(param_offset, numel, reader)]``: where the elements of ``kind`` of a parameter are, in row-major order.

        ``kind``: "fp32" for the masters, the name of a state, or "weight" for the value whatever it was saved as. []
        where the checkpoint has none; ``reader.read_range(start, numel)`` counts from the piece's first element.
        """
        if kind != "weight":
            return self.state_pieces(name, kind) if name in self.shapes() else []
        value = self.module().get(name)
        if value is None:
            return self.state_pieces(name, "fp32") if name in self.shapes() else self.frozen_pieces(name)
        return [(0, _numel(value), Range(value))]

    def frozen_shapes(self):
        """dict: name -> torch.Size of parameters that are not trained and are not in the model file in one piece."""
        return {}

    def frozen_pieces(self, name):
        """As ``pieces`` for the value of a parameter that is not trained and is not in the model file in one piece."""
        return []

    def weight_shape(self, name):
        """torch.Size of a parameter as it was saved, or None where it is not in the checkpoint."""
        value = self.module().get(name)
        if value is None:
            return self.shapes().get(name)
        return torch.Size(value.shape) if hasattr(value, "shape") else None

    def whole(self, name, kind):
        """``(tensor, number of its elements that were found)``: all of ``kind`` of a parameter. Others are 0."""
        pieces = self.pieces(name, kind)
        dtype = pieces[0][2].read_range(0, 0).dtype if pieces else torch.float32
        found = torch.zeros(self.weight_shape(name), dtype=dtype)
        return found, self.read_into(found, pieces, 0)

    @staticmethod
    def read_into(target, pieces, offset):
        """Fills ``target``, any shape, with the elements from ``offset`` on of the parameter that ``pieces`` describe.

        Returns how many elements there were: fewer than the target's where the pieces do not cover it.
        """
        flat = target.detach().view(-1)
        end, filled = offset + flat.numel(), 0
        for begin, numel, reader in pieces:
            low, high = max(begin, offset), min(begin + numel, end)
            if low < high:
                part = flat[low - offset : high - offset]
                if not (hasattr(reader, "fill") and reader.fill(part, low - begin)):
                    part.copy_(reader.read_range(low - begin, high - low))
                filled += high - low
        return filled

    @staticmethod
    def check_pieces(pieces, offset, numel):
        """The result of ``read_into`` for a target of ``numel`` elements. Opens the files without reading elements:
        raises their errors, and IndexError for a tensor that is too short."""
        filled = 0
        for begin, count, reader in pieces:
            low, high = max(begin, offset), min(begin + count, offset + numel)
            if low < high:
                reader.read_range(high - begin, 0)
                filled += high - low
        return filled

    def origin(self):
        """Where it comes from, for messages."""
        return f"the checkpoint {self.folder}" if self.folder else "the saved optimizer"


class SavedOver(SavedState):
    """Says what another ``SavedState`` says, but for what a subclass says itself."""

    def __init__(self, base):
        super().__init__()
        self._base, self.model = base, base.model
        self.folder, self.zero_stage, self.dp_world_size = base.folder, base.zero_stage, base.dp_world_size
        self.masters_only, self.model_path = base.masters_only, getattr(base, "model_path", None)


def _of_base(name):
    return lambda self, *arguments: getattr(self._base, name)(*arguments)


for _name in (
    "shapes", "param_groups", "state_names", "scalars", "state_pieces", "has_optimizer", "extra", "run_states",
    "aliases", "frozen_shapes", "frozen_pieces", "_cut",
):  # fmt: skip
    setattr(SavedOver, _name, _of_base(_name))


def with_names(groups, named):
    """Hyperparameters of saved parameter groups beside the names of their parameters."""
    return [
        {**{key: value for key, value in group.items() if key != "params"}, "names": list(names)}
        for group, names in zip(groups or [{} for _ in named], named)
    ]


def eager(value):
    """A lazy tensor's values; anything else as it is."""
    return value.read() if hasattr(value, "read_range") else value


def plain(value):
    """``value`` with all lazy tensors in it read."""
    if isinstance(value, dict):
        if not any(_holds_lazy(item) for item in value.values()):
            return value
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple) and any(_holds_lazy(item) for item in value):
        return type(value)(plain(item) for item in value)
    return eager(value)


def _holds_lazy(value):
    if isinstance(value, dict):
        return any(_holds_lazy(item) for item in value.values())
    if isinstance(value, (list, tuple)):
        return any(_holds_lazy(item) for item in value)
    return hasattr(value, "read_range")


def _numel(value):
    if torch.is_tensor(value):
        return value.numel()
    return torch.Size(value.shape).numel()
