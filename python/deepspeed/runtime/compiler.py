"""Import path of existing scripts."""

from deepspeed.engine.parts.compiling import is_compile_supported

__all__ = ["is_compile_supported"]
