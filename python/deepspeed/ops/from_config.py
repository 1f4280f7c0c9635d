"""Builders for optimizers that ``optimizer.type`` of a configuration names by their folder in ``ops``."""


def builder_of(cls):
    """A builder ``(name, parameters, params)`` that makes a ``cls``, for the ``from_config`` of a package.

    An optimizer that an engine makes works on fp32 masters, so the dtype of its states (``fp32_optimizer_states``) is
    fp32 whatever the config says of it: the key is accepted and not handed on.
    """

    def build(name, parameters, params):
        return cls(parameters, **{key: value for key, value in params.items() if key != "fp32_optimizer_states"})

    return build
