"""Values in nested dicts by their keys, configurations in their three forms, and files of JSON."""

import base64
import binascii
import contextlib
import json
import os


def get_val_by_key(d: dict, k):
    """The value of the key ``k`` of ``d``, or of the first dict inside of it that has the key; None without one."""
    if k in d:
        return d[k]
    found = (get_val_by_key(one, k) for one in d.values() if isinstance(one, dict))
    return next((value for value in found if value is not None), None)


def set_val_by_key(d: dict, k, vv):
    """Sets the key ``k`` wherever it is in ``d`` and in dicts inside of it."""
    if k in d:
        d[k] = vv
    for one in d.values():
        if isinstance(one, dict):
            set_val_by_key(one, k, vv)


def get_path(values, path, otherwise=None):
    """The value of a dotted path of keys."""
    for key in path.split("."):
        if not isinstance(values, dict) or key not in values:
            return otherwise
        values = values[key]
    return values


def set_path(values, path, value):
    """Sets the value of a dotted path; dicts on the way are made where there are none."""
    *above, last = path.split(".")
    for key in above:
        if not isinstance(values.get(key), dict):
            values[key] = {}
        values = values[key]
    values[last] = value


def drop_path(values, path):
    """Removes a dotted path, where it is there."""
    above, _, last = path.rpartition(".")
    holder = get_path(values, above) if above else values
    if isinstance(holder, dict):
        holder.pop(last, None)


def read_config(given):
    """The dict that ``given`` means: a dict, the path of a JSON file, JSON text, or base64 of that. ValueError for
    anything else."""
    if isinstance(given, dict):
        return given
    text, source = given, "the configuration in the script's arguments"
    try:
        if os.path.isfile(given):
            source = given
            with open(given, encoding="utf-8") as file:
                text = file.read()
        elif not given.lstrip().startswith("{"):
            text = base64.b64decode(given + "=" * (-len(given) % 4), altchars=b"-_", validate=True).decode()
        found = json.loads(text)
    except (OSError, binascii.Error, ValueError) as error:
        raise ValueError(
            f"autotuning: {given!r} is neither a JSON file (looked from {os.getcwd()}) nor JSON, nor base64 of it: "
            f"{error}"
        ) from None
    if not isinstance(found, dict):
        raise ValueError(f"autotuning: {source} holds a {type(found).__name__}, not an object with keys")
    return found


def as_base64(config):
    """The form of a configuration that needs no file."""
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode()


def read_json(path):
    """The object in a file, or None where there is no whole one."""
    with contextlib.suppress(OSError, ValueError):
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    return None


def write_text(path, text):
    """Writes a file that readers find whole or not at all."""
    with open(f"{path}.new", "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(f"{path}.new", path)


def write_json(path, values):
    write_text(path, json.dumps(values, indent=1) + "\n")
