"""``engine.compile``: the wrapped module through ``torch.compile``."""

from deepspeed._compat import TORCH2
from deepspeed.accelerator import get_accelerator
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.zero.gathers.compiled_units import compile_units


def is_compile_supported():
    """Whether this torch has ``torch.compile``."""
    return TORCH2


@engine_parts.add("_compiling")
class Compiling(Part):
    """A part of the engine. It compiles the module's computation; hooks, reduction and the step stay as they are. At
    stage 3 it compiles each unit whose parameters are gathered together, such as a block."""

    done = False

    @property
    @member
    def is_compiled(self):
        """True after ``compile``."""
        return self.done

    @member
    def compile(
        self,
        backend=get_accelerator().get_compile_backend(),  # noqa: B008 (the published signature)
        compile_kwargs={},  # noqa: B006 (the same; never modified)
        schedule=None,
        compiled_autograd_enabled=False,
    ):
        """Compiles the wrapped module in place; a second call does nothing.

        backend: of ``torch.compile``. compile_kwargs: more arguments of ``torch.compile``. schedule: passes of
        DeepCompile, which this build does not have. compiled_autograd_enabled: must stay false: gradients are taken by
        hooks on autograd's accumulators, which a compiled backward does not run.

        Raises RuntimeError on torch 1.13, which has no compiler, and ValueError for what cannot be done.
        """
        if not TORCH2:
            raise RuntimeError(
                "engine.compile needs torch 2.0 or later, which has torch.compile; this is torch 1.13. Leave the call "
                "out, or install a newer torch."
            )
        if schedule is not None:
            raise ValueError("engine.compile: schedule= lists passes of DeepCompile, which is off; leave it out")
        if compiled_autograd_enabled:
            raise ValueError(
                "engine.compile: compiled_autograd_enabled=True would bypass the hooks that collect gradients; leave "
                "it out: forward and backward of the module are compiled without it"
            )
        if "backend" in compile_kwargs:
            raise ValueError("engine.compile: pass backend= as an argument of its own, not inside compile_kwargs")
        if not self.done:
            module, gathering = self.engine.module, getattr(self.engine, "parameter_offload", None)
            if gathering is not None:
                compile_units(module, gathering, backend=backend, **compile_kwargs)
            else:
                module.compile(backend=backend, **compile_kwargs)
            self.done = True

    @member
    def is_deepcompile_active(self):
        """Whether the module was compiled with DeepCompile."""
        return self.done and self.engine.is_deepcompile_enabled()
