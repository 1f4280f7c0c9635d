"""Names and defaults of the top-level keys as constants: ``GRADIENT_CLIPPING``, ``GRADIENT_CLIPPING_DEFAULT``.

They are read from the schema in csrc/config, so that each has one definition.
"""

from deepspeed.config.model import layout

for _key, _facts in layout("training").items():
    globals()[_key.upper()] = _key
    if _facts["fields"] is None:
        globals()[_key.upper() + "_DEFAULT"] = _facts["default"]
