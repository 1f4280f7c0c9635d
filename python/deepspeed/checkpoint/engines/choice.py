"""Which checkpoint engine a configuration asks for."""

from deepspeed.checkpoint.engines import ENGINES

_NEEDED = ("create", "save", "load", "commit")


def engine_name(config):
    """The name under which ``config`` (a DeepSpeedConfig) wants an engine from ``ENGINES``."""
    section = config.checkpoint_config
    if section.engine is not None:
        return section.engine
    if config.datastates_config is not None:
        return "datastates"
    writer = section.writer
    if getattr(section, "async") or (writer is not None and writer.decoupled):
        return "async"
    return {"MOCK": "mock", "PYTHON": "python", "FAST": "fast"}[writer.type if writer is not None else "FAST"]


def make_engine(config):
    """A new checkpoint engine. One of ours is made by ``from_config(config)``, another by calling it with the section
    ``checkpoint``. Raises UnknownNameError for a name that nobody registered, TypeError for what is no engine."""
    name = engine_name(config)
    kind = ENGINES.get(name)
    made = kind.from_config(config) if hasattr(kind, "from_config") else kind(config.checkpoint_config)
    missing = [method for method in _NEEDED if not callable(getattr(made, method, None))]
    if missing:
        raise TypeError(
            f"the checkpoint engine {name!r} ({type(made).__name__}) has no {', '.join(missing)}: see "
            "CheckpointEngine in deepspeed.runtime.checkpoint_engine for what it must have"
        )
    return made
