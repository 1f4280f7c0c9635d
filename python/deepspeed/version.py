"""The version, written once: the package, the wheel and the checkpoints read it here."""

__version__ = "0.19.6"
