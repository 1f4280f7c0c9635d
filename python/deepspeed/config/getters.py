"""Single values out of a raw configuration dict, under the names that scripts know."""

from deepspeed.config.errors import KINDS, config_error, raise_if_broken
from deepspeed.config.model import layout
from deepspeed.config.read import read
from deepspeed.config.sections import DeepSpeedBF16Config, DeepSpeedFP16Config


def _value(param_dict, key):
    """The checked value of one top-level key; its default when it is absent."""
    if key not in param_dict:
        return layout("training")[key]["default"]
    native = read({key: param_dict[key]}, strict=False, sections_only=True)
    raise_if_broken(native, built_only=False)
    return native.values()[key]


def load_ds_config(config):
    """The configuration as the dict that the user wrote: ``config`` is that dict, a path, or url-safe base64 of JSON.

    Raises DeepSpeedConfigError when there is no such file, when it is no JSON, and for duplicate keys.
    """
    if isinstance(config, dict):
        return config
    native = read(config)
    twice = [issue for issue in native.issues() if issue["code"] == "duplicate_key"]
    if twice:
        raise config_error("\n".join(issue["text"] for issue in twice), [twice[0]["paths"][0]])
    return native.raw()


def resolved_sections(config, names, rules=True):
    """``{section: resolved values}`` of the sections ``names`` (as the schema spells them). Nothing else of ``config``
    is checked or needed: this is for code that runs before a trainer has filled in the "auto" blanks of the rest.

    ``config``: a dict, a path, url-safe base64 of JSON, or a DeepSpeedConfig. Raises DeepSpeedConfigError for what is
    wrong in these sections. ``rules`` false: keys need not fit together, since others may complete the section.
    """
    native = read(getattr(config, "_param_dict", config), strict=False, sections_only=True)
    wrong = [
        issue
        for issue in native.issues()
        if issue["severity"] == "error"
        and (rules or issue["code"] != "rule")
        and any(path.split(".")[0] in names for path in issue["paths"])
    ]
    if wrong:
        text = "\n".join(f"{issue['text']} {issue['suggestion']}".strip() for issue in wrong)
        kinds = {KINDS[issue["kind"]] for issue in wrong if issue["kind"] in KINDS}
        raise config_error(text, [issue["paths"][0] for issue in wrong], kinds, native.raw())
    values = native.values()
    return {name: values[name] for name in names}


def get_gradient_clipping(param_dict):
    """Largest gradient norm; 0.0 does not clip."""
    return float(_value(param_dict, "gradient_clipping"))


def get_log_level(param_dict):
    """DEBUG, INFO, WARNING, ERROR, CRITICAL or None."""
    return _value(param_dict, "log_level")


def get_train_batch_size(param_dict):
    return _value(param_dict, "train_batch_size")


def get_bfloat16_config(param_dict):
    """The section ``bf16``, or, when that is absent, ``bfloat16``."""
    return DeepSpeedBF16Config(**(param_dict.get("bf16", param_dict.get("bfloat16")) or {}))


def get_float16_config(param_dict):
    """The section ``fp16``."""
    return DeepSpeedFP16Config(**(param_dict.get("fp16") or {}))
