"""Forward and backward of an engine: loss scale, graph hooks, and backwards that the user runs."""

import torch

from deepspeed.config.sections import OffloadStateTypeEnum
from deepspeed.engine import cross_engine_scaling
from deepspeed.engine.members import Part, engine_parts, inside_hooks, member, run_hooks
from deepspeed.log import warning_once
from deepspeed.zero.core import aborted_together
from deepspeed.zero.nested import cast_floats, tensors_within

_STATES = {OffloadStateTypeEnum.lp_params, OffloadStateTypeEnum.lp_grads}


@engine_parts.add("_backward")
class Backward(Part):
    """A part of the engine."""

    def counted(self, forwards):
        """The values of ``forwards``, ``{number: value}`` of this micro-step, that a backward has reached, by their
        numbers. Where the engine's backward has reached none that it knows, because outputs were in an object of the
        script, all count."""
        window = self.engine._window
        numbers = window.reached or (sorted(forwards) if window.has_own_backward else ())
        return [forwards[number] for number in numbers if number in forwards]

    def before_micro_step(self, boundary):
        self.engine._agreement.tell()
        self.engine._assembly.shared.refuse()
        self._end_linear()
        if self.engine._window.needs_join:
            self._join(boundary)

    def _end_linear(self):
        if self.engine._stage_policy.shards_params:
            self.engine.parameter_offload.end_linear()

    def _join(self, boundary):
        """A rank without a backward in this micro-step still takes part in the reduction of the others' gradients."""
        core = self.engine.core
        has_gradient = core.has_grads()
        core.join_backward(boundary or self.engine._stage_policy.reduces_each_micro_step)
        if not has_gradient:
            warning_once(
                "engine.step() without a gradient: there was no backward on this rank since the last step. The step "
                "counts, and changes the weights only by the gradients of other ranks. Was engine.backward(loss) "
                "forgotten? This is said once.",
                key="a step without a gradient",
            )

    @member
    def forward(self, *inputs, **kwargs):
        """Runs the wrapped module. A plain ``backward()`` on what it returns trains, too."""
        engine = self.engine
        if engine.fp16_enabled() and engine.fp16_auto_cast():
            inputs, kwargs = cast_floats(inputs, torch.float16), cast_floats(kwargs, torch.float16)
        engine._need_states({OffloadStateTypeEnum.lp_params}, "engine.forward()")
        engine._user_weights.bring_home()
        run_hooks(engine, "add_keywords", kwargs)
        trains = engine._trains and torch.is_grad_enabled()
        if trains:
            engine._assembly.shared.refuse()
            run_hooks(engine, "see_inputs", inputs, kwargs)
            inputs, kwargs = cross_engine_scaling.with_graph_hooks(engine.core, inputs, kwargs)
        try:
            engine.progress.begin("forward")
            engine.progress.time_samples(engine.training)
            with inside_hooks(engine, "forward"):
                outputs = engine.module(*inputs, **kwargs)
        except BaseException as error:
            run_hooks(engine, "failed", error)
            if engine.core is not None and engine.core.gatherer is not None:
                engine.core.gatherer.abandon_forward()
                engine.parameter_offload.end_linear()
            raise
        finally:
            engine.progress.end("forward")
        if trains:
            found = [t for t in tensors_within(outputs) if t.requires_grad]
            engine._agreement.tell()
            self._expect_step()
            run_hooks(engine, "forwarded", engine.core.forwarded(found))
        return outputs

    def _expect_step(self):
        window = self.engine._accumulation.tell()
        if window.reduces and window.at_boundary:
            self.engine.stepping.expect()

    @member
    def backward(self, loss, retain_graph=False, scale_wrt_gas=True, gradient=None):
        """Accumulates the gradients of ``loss``, a scalar, and reduces them at the accumulation boundary.

        Divides by the accumulation steps unless ``scale_wrt_gas`` is false, and applies the loss scale. Returns the
        loss divided by the accumulation steps, of dynamic batches times the weight of this one. ``gradient``: as for
        ``Tensor.backward``, for a ``loss`` of any shape, which is then the sum of ``loss * gradient``.
        """
        engine = self.engine
        if not torch.is_tensor(loss):
            raise TypeError(
                f"engine.backward needs a tensor, got {type(loss).__name__}; pass the loss itself, not loss.item()"
            )
        if gradient is not None:
            if not torch.is_tensor(gradient) or gradient.shape != loss.shape:
                found = tuple(gradient.shape) if torch.is_tensor(gradient) else type(gradient).__name__
                raise ValueError(
                    f"engine.backward: gradient has shape {found} and the tensor {tuple(loss.shape)}; the two are equal"
                )
            loss = (loss * gradient.detach().to(loss.device)).sum()
        assert loss.numel() == 1, (
            f"engine.backward needs a scalar loss, got shape {tuple(loss.shape)}; reduce it first, for example with "
            "loss.mean()"
        )
        engine._need_optimizer("engine.backward")
        engine._need_states(_STATES, "engine.backward()")
        scale, parts = engine.stepping.loss_scale, engine.gradient_accumulation_steps() if scale_wrt_gas else 1
        run_hooks(engine, "see_loss", loss, parts)
        if parts > 1:
            loss = loss / parts
        weight = engine._dynamic.weight()
        if weight != 1.0:
            loss = loss * weight
        try:
            engine.progress.begin("backward")
            self._run(loss, scale, parts, retain_graph)
        except BaseException as error:
            run_hooks(engine, "failed", error)
            raise
        finally:
            engine.progress.end("backward")
            self._end_linear()
        mean = loss.detach().mean()
        engine.losses = mean if engine.losses is None else engine.losses + mean
        return loss

    def _run(self, loss, scale, parts, retain_graph):
        engine = self.engine
        if not engine._window.has_forward:  # which would have done so
            self._expect_step()
            engine._agreement.tell()
        root = loss.float() * scale if scale != 1.0 else loss
        engine.core.begin_backward(root)  # ends with the backward of `root`
        cross_engine_scaling.tell_others(engine, scale / parts)
        try:
            with aborted_together(engine.core), inside_hooks(engine, "backward"):
                root.backward(retain_graph=retain_graph)
        finally:
            cross_engine_scaling.tell_others(engine, 1.0)

    @member
    def _backward_epilogue(self):
        """After a ``loss.backward()`` of a script, for which it is optional: the backward of this engine has ended by
        itself where the loss came from its model. Scripts of several engines call it for each."""
        if self.engine.core is not None:
            self.engine.core.end_backward()

    @member
    def scale(self, loss):
        """``loss`` times the loss scale, for a backward that the user runs. Accumulation is divided by the engine."""
        engine = self.engine
        assert torch.is_tensor(loss) and loss.numel() == 1, (
            "engine.scale needs a scalar tensor, got "
            f"{f'shape {tuple(loss.shape)}' if torch.is_tensor(loss) else type(loss).__name__}; reduce it first, for "
            "example with loss.mean()"
        )
        assert engine.optimizer is not None, "engine.scale needs an optimizer"
        engine._window.scaled = True
        cross_engine_scaling.tell_others(engine, engine.stepping.loss_scale)
        return loss * engine.stepping.loss_scale

    @member
    def zero_grad(self, set_to_none=True):
        """Forgets all gradients accumulated so far."""
        engine = self.engine
        engine._auditing.forget()
        if engine.core is not None:
            engine.core.clear_grads()
        for param in engine.module.parameters():
            param.grad = None
