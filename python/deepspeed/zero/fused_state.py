"""Ties an Adam of ours (``FusedAdam``, ``DeepSpeedCPUAdam``) to the flat buffers of an engine core.

The optimizer object stays what users know: ``param_groups`` that schedulers write to, ``state`` with the moments of
each parameter, ``state_dict`` and ``load_state_dict``. Only its step runs on the flat buffers, in one fused pass.
"""


class FusedState:
    """The link between one optimizer and one core.

    ``params`` are the optimizer's own parameters in group order: one for each piece that this rank owns.
    """

    def __init__(self, core, optimizer, params, run_step):
        self.core = core
        self.optimizer = optimizer
        self.params = params
        self.run_step = run_step
        self.stepping = False
        self._install()

    def _views(self):
        exp_avg, exp_avg_sq, steps = self.core.slots(0), self.core.slots(1), self.core.steps()
        pieces = zip(self.params, self.core.pieces(), exp_avg, exp_avg_sq)
        for param, (index, _, _), first, second in pieces:
            yield param, {"step": steps[index], "exp_avg": first, "exp_avg_sq": second}

    def _install(self):
        for param, views in self._views():
            self.optimizer.state[param] = views

    def step(self):
        """Called by the optimizer's own ``step()``: inside an engine step only the update, else a whole step."""
        if not self.stepping:
            self.run_step()
            return
        self.core.adam([self.optimizer.adam_args(group) for group in self.optimizer.param_groups])

    def adopt(self):
        """Takes what ``load_state_dict`` put into ``optimizer.state`` into the flat buffers."""
        for param, views in self._views():
            loaded = self.optimizer.state.get(param, {})
            for name, view in views.items():
                if name not in loaded:
                    view.zero_()
                elif name == "step":
                    view.fill_(float(loaded[name]))
                elif loaded[name].numel() != view.numel():
                    raise ValueError(
                        f"optimizer state '{name}' has shape {tuple(loaded[name].shape)} where the parameter has "
                        f"{tuple(view.shape)}: the checkpoint is of another model or of other parameter groups"
                    )
                else:
                    view.copy_(loaded[name].reshape(view.shape))
            self.optimizer.state[param] = views
