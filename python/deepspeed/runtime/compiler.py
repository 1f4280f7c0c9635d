"""Import path of existing scripts."""

from deepspeed.engine.compiling import is_compile_supported

__all__ = ["is_compile_supported"]
