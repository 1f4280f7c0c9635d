"""transformers' table of attention functions, which models ask by name: chosen modules get another function, and the
code of models is not changed."""

import importlib
import weakref

from deepspeed.comm.mesh import made_here

# Names that models do not look up, or whose masks nothing else can read.
REFUSED = {
    "eager": "it computes inside of the model, which does not ask the table of attention functions",
    "flex_attention": "its masks of blocks cannot be read by another attention",
}


class Dispatch:
    """An entry of transformers' table: modules of models that were registered in this job have a function of their
    own; all others work as before."""

    def __init__(self, core):
        self.core, self.shared = core, []
        self.__name__ = getattr(core, "__name__", type(core).__name__)

    def __call__(self, module, *args, **kwargs):
        for matches, attention, job in self.shared:
            if matches(module) and job() is made_here():
                return attention(module, *args, **kwargs)
        return self.core(module, *args, **kwargs)


def table():
    """The table; ImportError where transformers is missing or too old to have one."""
    return importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS


def install(table, name, matches, attention):
    """Modules that match use ``attention`` where they ask ``table`` for ``name``."""
    if not isinstance(table[name], Dispatch):
        table.register(name, Dispatch(table[name]))
    job = made_here()  # groups end with it
    kept = [entry for entry in table[name].shared if entry[2]() is job]
    table[name].shared = [(matches, attention, weakref.ref(job)), *kept]


def installed(table, name, modules):
    """The functions that ``modules`` have in this job under ``name``, the one that is used first."""
    entry = table.get(name)
    shared = entry.shared if isinstance(entry, Dispatch) else []
    return [found for matches, found, job in shared if job() is made_here() and any(map(matches, modules))]


def core_of(table, name, key, what):
    """transformers' own function; ValueError, about ``key``, if it cannot do ``what``."""
    if name in REFUSED:
        raise ValueError(f'{key} "{name}" cannot {what}: {REFUSED[name]}. Use one of {usable(table)}')
    if name not in table and "/" in name:
        importlib.import_module("transformers.integrations.hub_kernels").load_and_register_attn_kernel(name)
    if name not in table:
        raise ValueError(f'transformers has no attention function "{name}" ({key}): use one of {usable(table)}')
    found = table[name]
    return found.core if isinstance(found, Dispatch) else found


def usable(table):
    return ", ".join(sorted(name for name in table if name not in REFUSED and not name.startswith("paged")))


def base_of(model):
    """The model that one of PEFT's objects wraps, or ``model`` itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def is_model(model):
    """Whether ``model``, or what it wraps as PEFT's objects do, is one of transformers."""
    return hasattr(getattr(base_of(model), "config", None), "get_text_config")


# ---- what models pass to their functions -----------------------------------------------------------------------------
def name_of(attention):
    """Kernels of the hub are partial calls."""
    return getattr(getattr(attention, "func", attention), "__name__", "")


def causal_of(module, kwargs):
    causal = kwargs.get("is_causal")
    return getattr(module, "is_causal", True) if causal is None else causal


def window_of(module, kwargs):
    return kwargs.get("sliding_window", getattr(module, "sliding_window", None))
