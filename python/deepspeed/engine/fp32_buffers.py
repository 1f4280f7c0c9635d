"""The buffers that ``data_types.buffer_dtype`` leaves in fp32."""

import re


def patterns_of(module, setting, fp16):
    """Regular expressions for names of modules whose buffers stay fp32 (``keep_in_fp32_modules``).

    Args:
        setting: a pattern or a list of them, or ``"auto"``: those that a model of transformers names for this precision.
    """
    if setting != "auto":
        return [setting] if isinstance(setting, str) else list(setting)
    names = set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    if fp16:
        names |= set(getattr(module, "_keep_in_fp32_modules", None) or ())
    return sorted(re.escape(name) for name in names)


def cast_buffers(module, dtype, patterns):
    """Casts floating-point buffers of ``module`` to ``dtype`` but those below modules that a pattern names. A pattern
    matches whole parts of a dotted name: ``"gate"`` is ``layers.0.gate.scale``, not ``gated``."""
    keep = re.compile("|".join(rf"(?:^|\.)(?:{pattern})(?:\.|$)" for pattern in patterns)) if patterns else None
    for path, one in module.named_modules():
        for name, buffer in one._buffers.items():
            if buffer is None or not buffer.is_floating_point():
                continue
            if keep is None or not keep.search(f"{path}.{name}"):
                one._buffers[name] = buffer.to(dtype)
