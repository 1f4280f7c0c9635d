"""Random-LTD: layers compute on a random subset of the tokens of each sample, and the other tokens skip the layer.

The method is that of Yao et al. 2022, "Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for
Large-scale Transformers" (arXiv 2211.11586). The choice of tokens depends only on the seed, the step, the number of the
sample in the step and the layer, so a recomputation and a run on another number of ranks choose the same tokens.
"""

import inspect

import torch

from deepspeed import _native
from deepspeed.data.curriculum import CurriculumScheduler
from deepspeed.data.layer_forward import LayerForward, unwrapped
from deepspeed.ops.random_ltd.dropping_utils import GatherTokens, ScatterTokens, cut_mask

# Arguments with one row for each token, besides the mask. Transformers passes them to the layers of many models.
_BY_TOKEN = ("position_ids", "position_embeddings", "cache_position")
_ONE = inspect.Parameter
_WRAPPED = "random_ltd_layer"  # a part of names in state dicts of the published library


class RandomLTDScheduler:
    """The number of tokens that layers keep. ``config``: the section ``random_ltd``, a mapping.

    ``model_layer_num``: the number of layers of the model. ``consumed_layer_tokens``: the sum of the tokens of all
    layers and samples up to now, in which a layer that drops tokens counts with those that it keeps.
    """

    def __init__(self, config):
        schedule, settings = config["random_ltd_schedule"], config["random_ltd_schedule"]["schedule_config"]
        self.model_layer_num = config["total_layer_num"]
        self.random_ltd_layer_num = config["random_ltd_layer_num"] or len(config["random_ltd_layer_id"])
        self.global_batch_size = config["global_batch_size"]
        self._schedule = CurriculumScheduler(
            {
                "min_difficulty": schedule["min_value"],
                "max_difficulty": schedule["max_value"],
                "schedule_type": schedule["schedule_type"] or "fixed_linear",
                "schedule_config": {
                    "total_curriculum_step": settings["require_steps"],
                    "difficulty_step": settings["seq_per_step"],
                },
            }
        )
        self.max_value = schedule["max_value"]
        self.reset_to_init()

    def reset_to_init(self):
        """Resets the state to that before step 0."""
        self.current_value = self.get_value(0)
        self.consumed_layer_tokens, self.curr_step = 0, -1

    def get_value(self, global_steps):
        """The number of tokens that the schedule keeps at a step."""
        return self._schedule.get_difficulty(global_steps)

    def get_current_seq(self):
        return self.current_value

    def set_current_seq(self, seq_length):
        self.current_value = seq_length

    def get_random_ltd_layer_num(self):
        return self.random_ltd_layer_num

    def layer_tokens(self, kept):
        """The tokens of all layers and samples of a step in which layers that drop keep ``kept`` tokens of a sample."""
        full = self.model_layer_num - self.random_ltd_layer_num
        return self.global_batch_size * (kept * self.random_ltd_layer_num + self.max_value * full)

    def get_total_layer_tokens(self, train_iters):
        """The value of ``consumed_layer_tokens`` after ``train_iters`` steps."""
        return sum(self.layer_tokens(self.get_value(step)) for step in range(train_iters))

    def update_seq(self, global_steps):
        """Sets the number of kept tokens for step ``global_steps`` and returns it. Counts the tokens of each step
        once."""
        self.current_value = self.get_value(global_steps)
        if global_steps > self.curr_step:
            self.curr_step = global_steps
            self.consumed_layer_tokens += self.layer_tokens(self.current_value)
        return self.current_value

    def state_dict(self):
        return {
            "consumed_layer_tokens": self.consumed_layer_tokens,
            "curr_step": self.curr_step,
            "current_value": self.current_value,
            "max_value": self.max_value,
            "model_layer_num": self.model_layer_num,
            "random_ltd_layer_num": self.random_ltd_layer_num,
        }

    def load_state_dict(self, state_dict):
        """Restores the counts. The layers and the schedule are those of the configuration."""
        self.consumed_layer_tokens = state_dict["consumed_layer_tokens"]
        self.curr_step = state_dict["curr_step"]
        self.current_value = state_dict["current_value"]


class TokenDroppingForward(LayerForward):
    """A layer that drops tokens. Its arguments besides the hidden states must be known by name."""

    KEY = "_token_dropping"

    def __init__(self, layer):
        parameters = list(inspect.signature(layer.forward).parameters.values())
        if not parameters or parameters[0].kind not in (_ONE.POSITIONAL_ONLY, _ONE.POSITIONAL_OR_KEYWORD):
            raise ValueError(
                f"convert_to_random_ltd: the first argument of {type(layer).__name__}.forward is "
                f"{parameters[0] if parameters else 'missing'}: it must be the hidden states, under a name of its own"
            )
        hidden, *others = parameters
        for one in others:
            if one.kind is one.VAR_KEYWORD:
                continue
            if one.kind is one.VAR_POSITIONAL or one.default is one.empty:
                raise ValueError(
                    f"convert_to_random_ltd: argument '{one}' of {type(layer).__name__}.forward has no default. "
                    "Arguments besides the hidden states are known by name, because some have a row for each token: "
                    "give it a default (attention_mask=None) and pass it by its name"
                )
        self.names = [hidden.name, *(one.name for one in others if one.kind is one.POSITIONAL_OR_KEYWORD)]
        self.takes = {hidden.name, *(one.name for one in others)}
        self.takes_any = any(one.kind is one.VAR_KEYWORD for one in others)
        super().__init__(layer)

    def bound(self, args, kwargs):
        """All arguments by name."""
        return {**dict(zip(self.names, args)), **kwargs}


class TokenDropping:
    """The choices of tokens of one engine. ``seed``: the seed of the choices. ``rank``, ``ranks``: the number of this
    rank among those with other samples, and how many there are.

    ``lengths``: ``{number of a layer that drops: (tokens, kept tokens) of a sample}`` in its last forward.
    """

    def __init__(self, scheduler, config, seed, rank, ranks):
        self.scheduler, self.seed, self.rank, self.ranks = scheduler, seed & (2**64 - 1), rank, ranks
        self.mask_name = config["model_mask_name"]
        self.batch_first = config["hidden_state_order"] == "batch_seq_dim"
        self.layers = config["random_ltd_layer_id"]
        self.step = self.micro_step = 0
        self.lengths = {}

    def take(self, forwards):
        """Takes the converted layers of a model, by name. ValueError if the configuration does not fit the model."""
        count, wanted = self.scheduler.model_layer_num, self.layers
        outside = [number for number in wanted if number >= len(forwards)]
        if outside:
            raise ValueError(
                f"random_ltd.random_ltd_layer_id names the layers {outside}, and the model has {len(forwards)} layers "
                f"of the class that was converted: name numbers from 0 to {len(forwards) - 1}"
            )
        if len(set(wanted)) < len(wanted):
            raise ValueError(f"random_ltd.random_ltd_layer_id {wanted} names a layer twice: name each layer once")
        if count != len(forwards):
            raise ValueError(
                f"random_ltd.total_layer_num is {count}, and the model has {len(forwards)} layers of the class that "
                f"was converted: {', '.join(forwards)}. Set it to {len(forwards)}, or convert another class"
            )
        for number, (name, forward) in enumerate(forwards.items()):
            if self.mask_name and not forward.takes_any and self.mask_name not in forward.takes:
                raise ValueError(
                    f"random_ltd.model_mask_name '{self.mask_name}' is not an argument of {name}.forward, whose "
                    f"arguments are {', '.join(forward.names)}: name the attention mask, or leave the key out"
                )
            if number in wanted:
                forward.taken(self, number)

    def run(self, forward, args, kwargs):
        """Runs the layer on the tokens that it keeps."""
        given = forward.bound(args, kwargs)
        hidden = given[forward.names[0]]
        samples, length = hidden.shape[:2] if self.batch_first else hidden.shape[1::-1]
        kept = min(self.scheduler.get_current_seq(), length)
        self.lengths[forward.number] = length, kept
        if kept == length:
            return forward.own(*args, **kwargs)
        first = (self.micro_step * self.ranks + self.rank) * samples
        chosen = _native._C.choose_tokens(self.seed, self.step, forward.number, first, samples, length, kept)
        chosen = chosen.to(hidden.device, non_blocking=True)
        passed, some = GatherTokens.apply(hidden, chosen, self.batch_first)
        cut = {forward.names[0]: some, **self._cut(given, chosen, length)}
        replaced = [cut.get(name, value) for name, value in zip(forward.names, args)]
        made = forward.own(*replaced, **{name: cut.get(name, value) for name, value in kwargs.items()})
        words = "random-LTD", "hidden states", "a layer must return hidden states of the same shape"
        return forward.with_hidden(
            made, some, lambda kept: ScatterTokens.apply(passed, kept, chosen, self.batch_first), words
        )

    def _cut(self, given, chosen, length):
        """The other arguments that have one row for each token, cut to the rows of the kept tokens."""
        cut = {}
        if self.mask_name and torch.is_tensor(given.get(self.mask_name)):
            cut[self.mask_name] = cut_mask(given[self.mask_name], chosen, length)
        for name in _BY_TOKEN:
            value = given.get(name)
            if torch.is_tensor(value):
                cut[name] = _of_tokens(name, value, chosen, length)
            elif isinstance(value, (tuple, list)):
                cut[name] = type(value)([_of_tokens(name, one, chosen, length) for one in value])
        return cut


def _of_tokens(name, value, chosen, length):
    """The rows of the chosen tokens in ``value``, [1 or samples, tokens, ...] or [tokens]."""
    index = chosen.long()
    if value.shape == (length,):
        return value[index]
    if value.dim() < 2 or value.shape[0] not in (1, len(chosen)) or value.shape[1] != length:
        raise ValueError(
            f"random-LTD: argument '{name}' has shape {tuple(value.shape)}; for {len(chosen)} samples of {length} "
            "tokens its first dimensions must be [1 or samples, tokens]"
        )
    value = value.expand(len(chosen), *value.shape[1:])
    return value.gather(1, index.view(*index.shape, *[1] * (value.dim() - 2)).expand(-1, -1, *value.shape[2:]))


def is_on(data_efficiency):
    """Whether random-LTD is enabled: the section ``data_efficiency`` has three keys for it, and all must be true."""
    routing = data_efficiency["data_routing"]
    return data_efficiency["enabled"] and routing["enabled"] and routing["random_ltd"]["enabled"]


def convert_to_random_ltd(model, convert_type):
    """Lets the layers of the class ``convert_type`` drop tokens, by the section
    ``data_efficiency.data_routing.random_ltd``. ``model``: an engine, or a module that is passed to
    ``deepspeed.initialize`` later. It is returned. The names of the parameters do not change, so a checkpoint fits the
    model without random-LTD, too."""
    TokenDroppingForward.convert(unwrapped(model), convert_type, "convert_to_random_ltd")
    if unwrapped(model) is not model:
        model.random_ltd_initialize()
    return model


def remove_random_ltd_state_dict(state_dict):
    """``state_dict`` with the names of the model without random-LTD. State dicts of this library have these names
    already. Names in files of the published library have one more part, which is removed here, also in inner dicts."""
    found = type(state_dict)()
    for name, value in state_dict.items():
        plain = ".".join(one for one in name.split(".") if one != _WRAPPED) if isinstance(name, str) else name
        found[plain] = remove_random_ltd_state_dict(value) if isinstance(value, dict) else value
    return found


def save_without_random_ltd(model):
    """The state dict of ``model``, an engine or a module, for a model without random-LTD."""
    return remove_random_ltd_state_dict(unwrapped(model).state_dict())
