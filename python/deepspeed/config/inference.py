"""The configuration of ``deepspeed.init_inference`` and of the ragged engine."""

import torch

from deepspeed.config.errors import config_error, raise_if_broken
from deepspeed.config.model import ConfigSection, layout, section
from deepspeed.config.read import read
from deepspeed.config.sections import DeepSpeedZeroConfig

DTYPES = {
    torch.float16: ("torch.float16", "fp16", "float16", "half"),
    torch.float32: ("torch.float32", "fp32", "float32", "float"),
    torch.bfloat16: ("torch.bfloat16", "bf16", "bfloat16", "bfloat"),
    torch.int8: ("torch.int8", "int8"),
}


def as_dtype(value):
    """The torch.dtype that a name of the schema means; a torch.dtype stays what it is."""
    for dtype, names in DTYPES.items():
        if value is dtype or value in names:
            return dtype
    known = ", ".join(str(dtype) for dtype in DTYPES)
    raise config_error(f"dtype = {value!r} must be one of {known}.", ["dtype"], value=value)


DeepSpeedTPConfig = section("DeepSpeedTPConfig", "tp", "inference")
DeepSpeedMoEConfig = section("DeepSpeedMoEConfig", "moe", "inference")
QuantizationConfig = section("QuantizationConfig", "quant", "inference")
InferenceCheckpointConfig = section("InferenceCheckpointConfig", "ckpt_config", "inference")


class _WholeConfig(ConfigSection):
    """A section object over a whole configuration."""

    def __init__(self, strict=False, **data):
        if strict and "auto" in data.values():
            raise config_error('"auto" is not a value here, because strict is set.')
        native = read(data, root=self.ROOT)
        raise_if_broken(native, built_only=False)
        self._fill(native.values(), layout(self.ROOT))


class DeepSpeedInferenceConfig(_WholeConfig):
    """Keys of init_inference. ValueError for wrong values; TypeError when ``dtype`` is neither a name nor a dtype."""

    ROOT = "inference"
    CASTS = {"dtype": as_dtype}
    CHILDREN = {
        "tp": DeepSpeedTPConfig,
        "moe": DeepSpeedMoEConfig,
        "quant": QuantizationConfig,
        "ckpt_config": InferenceCheckpointConfig,
        "zero": DeepSpeedZeroConfig,
    }

    def __init__(self, strict=False, **data):
        dtype = data.get("dtype")
        if dtype is not None and not isinstance(dtype, (str, torch.dtype)):
            raise TypeError(f"dtype = {dtype!r} is a {type(dtype).__name__}. It must be a torch.dtype or its name.")
        super().__init__(strict=strict, **data)


RaggedTPConfig = section("RaggedTPConfig", "tp", "ragged_inference")


class RaggedInferenceEngineConfig(_WholeConfig):
    """Keys of the ragged engine."""

    ROOT = "ragged_inference"
    CHILDREN = {"tp": RaggedTPConfig}


def default_inference_config():
    """A dict of all keys of init_inference with their defaults."""
    return DeepSpeedInferenceConfig().model_dump()


def merge_inference_config(config, kwargs):
    """One dict out of ``config`` and the keywords of init_inference: keywords add to it.

    Raises ValueError (DeepSpeedConfigError) for a key that both give with different values.
    """
    for key in sorted(set(config) & set(kwargs)):
        if config[key] is not kwargs[key] and config[key] != kwargs[key]:
            raise config_error(
                f"init_inference got {key} = {config[key]!r} in config and {key} = {kwargs[key]!r} as a keyword. "
                f"Keep one of them."
            )
    return {**config, **kwargs}
