"""Methods of the published engine that scripts replace and that this engine does not call: one warning each."""

from deepspeed.engine.members import Part, engine_parts
from deepspeed.log import warning_once

# Name -> what happens instead.
_NOT_CALLED = {
    "clip_fp32_gradients": "gradients are clipped by gradient_clipping in the native step",
    "_copy_recovery_script": "a checkpoint folder gets zero_to_fp32.py whenever a checkpoint is saved",
    "_support_torch_style_backward": "loss.backward() of a script works at every stage",
}


@engine_parts.add("replaced")
class Replaced(Part):
    """Looks for such methods once, before the first step, when a script has made its changes."""

    _looked = False

    def before_step(self):
        if self._looked:
            return
        self._looked = True
        engine = self.engine
        for name, instead in _NOT_CALLED.items():
            if name in vars(engine) or any(name in vars(cls) for cls in type(engine).__mro__):
                warning_once(f"the engine's {name} was set by the script, and it has no effect here: {instead}.")
