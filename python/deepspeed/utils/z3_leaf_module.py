"""Leaf modules of ZeRO stage 3: modules whose parameters, with those of all modules inside, are gathered as one unit.

Meant for modules whose forward runs other children on other ranks or in other steps (a mixture of experts), and for
trees of modules so small that gathering them one by one costs more than it saves. Flag them before
``deepspeed.initialize``, or name them in the config: ``zero_optimization.leaf_module``.
"""

import torch

from deepspeed.log import logger

_FLAG = "_z3_leaf"
_COUNT = "ds_z3_leaf_count"  # on parameters; a number, so that it can be pickled and holds no module alive


def z3_leaf_module(model):
    """Whether ``model`` is flagged as a leaf; modules inside or around it do not count."""
    return model.__dict__.get(_FLAG, False)


def z3_leaf_parameter(model):
    """Whether a module flagged as a leaf holds the parameter ``model``, itself or in a module inside.

    Known from the moment of flagging: parameters added later, and copies of parameters, count once they are flagged.
    """
    return getattr(model, _COUNT, 0) > 0


def set_z3_leaf_module(model, flag):
    """Flags the module ``model`` as a leaf, or takes the flag away."""
    change = bool(flag) - z3_leaf_module(model)
    model.__dict__[_FLAG] = bool(flag)
    for param in model.parameters() if change else ():
        setattr(param, _COUNT, max(0, getattr(param, _COUNT, 0) + change))


def get_z3_leaf_modules(model):
    """The flagged modules in ``model``, itself included, in the order of ``model.modules()``."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Flags the modules in ``model`` that are instances of the classes, which may be given as classes or as names.

    A name is the class's own (``"MixtralSparseMoeBlock"``) or its full one, with the Python module in front; subclasses
    are found through the class, not through its name. Returns the list of modules found.

    Raises:
        ValueError: nothing was found, unless ``raise_if_not_found`` is False.
        TypeError: an item is neither a class of modules nor a name.
    """
    return _flag_by_class(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(model, leaf_module_classes, raise_if_not_found=True):
    """Takes the flag from the modules that ``set_z3_leaf_modules`` would give it to; returns them. Raises alike."""
    return _flag_by_class(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(model, module_names, flag=True, raise_if_not_found=True):
    """Flags modules by their names in ``model.named_modules()``, as in ``"layers.0.moe"``.

    Returns ``(modules found, names not found)``. Raises ValueError, and flags nothing, when a name is not found, unless
    ``raise_if_not_found`` is False.
    """
    return _flag_by_name(model, module_names, flag, raise_if_not_found, str.__eq__, "has the name")


def set_z3_leaf_modules_by_suffix(model, module_name_suffixes, flag=True, raise_if_not_found=True):
    """Flags the modules whose names in ``model.named_modules()`` end with one of the suffixes, as in ``".moe"``.

    Returns ``(modules found, suffixes not found)``; raises as ``set_z3_leaf_modules_by_name`` does.
    """
    return _flag_by_name(model, module_name_suffixes, flag, raise_if_not_found, str.endswith, "has a name ending with")


def apply_z3_leaf_module_config(model, leaf_module_config):
    """Flags what the config section ``zero_optimization.leaf_module`` lists: classes, names, name suffixes.

    Returns the list of modules found, each once. Names and suffixes that fit nothing are logged: they were meant for
    this model. Classes are not, as the default lists classes of several model families.
    """
    found = set_z3_leaf_modules(model, leaf_module_config.classes, raise_if_not_found=False)
    for key, flag_all in (("names", set_z3_leaf_modules_by_name), ("name_suffixes", set_z3_leaf_modules_by_suffix)):
        modules, missing = flag_all(model, getattr(leaf_module_config, key), raise_if_not_found=False)
        found += [module for module in modules if not any(module is other for other in found)]
        if missing:
            logger.warning(
                f"zero_optimization.leaf_module.{key}: no module of {type(model).__name__} fits "
                f"{_quoted(missing)}; compare with model.named_modules()."
            )
    return found


def _flag_by_class(model, classes, flag, raise_if_not_found):
    classes = _listed(classes)
    for item in classes:
        if not (isinstance(item, str) or (isinstance(item, type) and issubclass(item, torch.nn.Module))):
            raise TypeError(f"a leaf module is given as a class of modules or its name, got {item!r}")
    types = tuple(item for item in classes if isinstance(item, type))
    names = {item for item in classes if isinstance(item, str)}
    found = [m for m in model.modules() if isinstance(m, types) or not names.isdisjoint(_class_names(type(m)))]
    if not found and raise_if_not_found:
        asked = ", ".join(item if isinstance(item, str) else _class_names(item)[1] for item in classes)
        present = sorted({type(module).__name__ for module in model.modules()})
        raise ValueError(
            f"no module of {type(model).__name__} is of the classes [{asked}]; it has modules of {', '.join(present)}. "
            "Pass raise_if_not_found=False where that is meant."
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _class_names(kind):
    return kind.__name__, f"{kind.__module__}.{kind.__qualname__}"


def _flag_by_name(model, wanted, flag, raise_if_not_found, fits, words):
    wanted = _listed(wanted)
    found, missing = {}, []
    for want in wanted:
        matches = [module for name, module in model.named_modules() if fits(name, want)]
        found.update((id(module), module) for module in matches)
        if not matches:
            missing.append(want)
    if missing and raise_if_not_found:
        raise ValueError(
            f"no module of {type(model).__name__} {words} {_quoted(missing)}; compare with model.named_modules(), or "
            "pass raise_if_not_found=False where that is meant."
        )
    for module in found.values():
        set_z3_leaf_module(module, flag)
    return list(found.values()), missing


def _listed(items):
    return [items] if isinstance(items, (str, type)) else list(items)


def _quoted(names):
    return ", ".join(repr(name) for name in names)
