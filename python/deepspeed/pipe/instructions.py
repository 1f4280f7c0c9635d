"""Instructions of a pipeline: what an engine's ``_INSTRUCTION_MAP`` gives a method to, and clients derive from."""


def call_to_str(base, *args, **kwargs):
    """``call_to_str("f", 1, b="x")`` is ``"f(1, b='x')"``."""
    return f"{base}({', '.join([repr(arg) for arg in args] + [f'{key}={value!r}' for key, value in kwargs.items()])})"


class PipeInstruction:
    """One thing that a stage does. Keyword arguments become attributes."""

    def __init__(self, **kwargs):
        self.name = type(self).__name__
        self.kwargs = kwargs
        for key, value in kwargs.items():
            setattr(self, key, value)

    def __repr__(self):
        return call_to_str(self.name, **self.kwargs)


class OptimizerStep(PipeInstruction):
    """The update, after all gradients have been reduced."""


class ReduceGrads(PipeInstruction):
    """Reduces gradients over the data-parallel ranks of the stage."""


class ReduceTiedGrads(PipeInstruction):
    """Adds up gradients of tied layers over the stages that have them."""


class BufferOpInstruction(PipeInstruction):
    """Works on the buffer ``buffer_id`` of the stage."""

    def __init__(self, buffer_id, **kwargs):
        super().__init__(buffer_id=buffer_id, **kwargs)


class LoadMicroBatch(BufferOpInstruction):
    """Takes the next micro-batch: the first stage its inputs, the last one its labels."""


class ForwardPass(BufferOpInstruction):
    """Runs the layers of the stage; on the last stage the loss, too."""


class BackwardPass(BufferOpInstruction):
    """Gradients of the inputs and of the weights."""


class BackwardInputPass(BufferOpInstruction):
    """Gradients of the inputs, which the previous stage waits for. A ``BackwardWeightPass`` follows."""


class BackwardWeightPass(BufferOpInstruction):
    """Gradients of the weights, which nobody waits for before the step."""


class SendActivation(BufferOpInstruction):
    """Sends outputs to the next stage."""


class RecvActivation(BufferOpInstruction):
    """Receives inputs from the previous stage."""


class SendGrad(BufferOpInstruction):
    """Sends gradients of the inputs to the previous stage."""


class RecvGrad(BufferOpInstruction):
    """Receives gradients of the outputs from the next stage."""
