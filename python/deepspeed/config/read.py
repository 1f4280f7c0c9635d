"""The forms a configuration comes in: dict, path of a JSON file, url-safe base64 of JSON, ``args.deepspeed_config``."""

import base64
import binascii
import os

import torch

from deepspeed._native import _C, DeepSpeedConfigError
from deepspeed.log import logger

_other_names = {}
_variables = {}


def _torch_classes(module, base_names):
    bases = tuple(getattr(module, name) for name in base_names if hasattr(module, name))
    found = (getattr(module, name) for name in dir(module) if not name.startswith("_"))
    return sorted({item.__name__ for item in found if isinstance(item, type) and issubclass(item, bases)})


def other_names():
    """Names that csrc/config cannot know: for each key the class names of this torch that may stand for a type."""
    if not _other_names:
        schedulers = torch.optim.lr_scheduler
        _other_names["optimizer.type"] = _torch_classes(torch.optim, ["Optimizer"])
        bases = ["_LRScheduler", "LRScheduler", "ReduceLROnPlateau"]
        _other_names["scheduler.type"] = _torch_classes(schedulers, bases)
    return _other_names


def environment(root):
    """``{variable: text}`` of the variables that override a key and are set."""
    if root not in _variables:
        _variables[root] = tuple(_C.config.environment_variables(root))
    return {name: os.environ[name] for name in _variables[root] if name in os.environ}


def _decode_base64(text):
    """The bytes of a JSON object in url-safe base64, or None when ``text`` is no such thing."""
    padded = text.strip() + "=" * (-len(text.strip()) % 4)
    try:
        data = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True)
    except (binascii.Error, UnicodeEncodeError, ValueError):
        return None
    return data if data.lstrip()[:1] == b"{" else None


def _not_utf8(value, at="a key at the top"):
    """(key, text) of the first text that has half of a surrogate pair, as os.fsdecode makes it of a file name."""
    if isinstance(value, str):
        try:
            value.encode()
            return None
        except UnicodeEncodeError:
            return at, value
    inside = []
    if isinstance(value, dict):
        prefix = "" if at == "a key at the top" else f"{at}."
        inside = [(item, f"{prefix}{key}") for key, item in value.items()] + [(key, at) for key in value]
    elif isinstance(value, (list, tuple)):
        inside = [(item, at) for item in value]
    return next(filter(None, (_not_utf8(item, where) for item, where in inside)), None)


def read(config, root="training", strict=None, sections_only=False):
    """Resolves ``config`` (see the module) to a native ``Config``, which collects what is wrong instead of raising.

    ``strict``: unknown top-level keys are errors; None asks the environment variable DS_STRICT_CONFIG.
    Raises DeepSpeedConfigError when there is nothing to resolve: no such file, not JSON, not a dict.
    """
    if strict is None:
        strict = os.environ.get("DS_STRICT_CONFIG", "") not in ("", "0")
    options = {
        "root": root,
        "strict": strict,
        "sections_only": sections_only,
        "other_names": other_names(),
        "environment": environment(root),
    }
    if isinstance(config, dict):
        try:
            odd = _not_utf8(config)
        except RecursionError:  # a dict that holds itself, which has an error of its own
            odd = None
        if odd is not None:
            raise DeepSpeedConfigError(
                f"config: {odd[0]} is {ascii(odd[1])}, which has bytes that are not UTF-8. Configurations are JSON, "
                "whose texts are UTF-8: rename that file or folder"
            )
        return _C.config.resolve_dict(config, **options)
    if not isinstance(config, (str, os.PathLike)):
        raise DeepSpeedConfigError(
            f"The configuration is {_shown(config)}. Pass a dict, the path of a JSON file, or url-safe base64 of JSON."
        )
    path = os.fspath(config)
    if isinstance(config, str) and (len(path) > 4096 or "\0" in path or not os.path.exists(path)):
        data = _decode_base64(path)
        if data is not None:
            return _C.config.resolve_text(data, source="base64 config", **options)
        raise DeepSpeedConfigError(
            f"The configuration {_shown(config)} is neither an existing file (looked from {os.getcwd()}) nor url-safe "
            f"base64 of a JSON object. Check the path."
        )
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise DeepSpeedConfigError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    return _C.config.resolve_text(text, source=path, **options)


def _shown(config):
    try:
        text = repr(config)
    except Exception:  # a repr of the program's own may raise anything
        text = f"a {type(config).__name__}"
    return text if len(text) <= 200 else f"{text[:200]}..."


def choose_config(args=None, config=None, config_params=None):
    """The one configuration among ``initialize``'s arguments: ``config``, its older name ``config_params``, or
    ``args.deepspeed_config`` (deprecated: ``args.deepscale_config``).

    Raises AssertionError (which is a DeepSpeedConfigError, too) when two of them are given, or none.
    """
    given = {"config": config, "config_params": None if config_params is config else config_params}
    given.update({f"args.{name}": getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")})
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) == 1:
        if "args.deepscale_config" in given:
            logger.warning("args.deepscale_config is deprecated; use args.deepspeed_config (--deepspeed_config).")
        return next(iter(given.values()))
    if not given:
        raise _C.config.DeepSpeedConfigAssertionError(
            "There is no DeepSpeed configuration. Pass config= to deepspeed.initialize, or --deepspeed_config FILE."
        )
    raise _C.config.DeepSpeedConfigAssertionError(
        f"The DeepSpeed configuration is given more than once: {' and '.join(given)}. Keep one of them."
    )
