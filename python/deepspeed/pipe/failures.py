"""The error of pipelines, and errors again with another text."""


class PipelineError(RuntimeError):
    """Something that a pipeline cannot do, or that went wrong on one of its stages."""


def retold(error, text):
    """``error`` again, with ``text``; a ``PipelineError`` where its class takes no text or ends loops."""
    if isinstance(error, (StopIteration, StopAsyncIteration)):
        return PipelineError(text)
    try:
        again = type(error)(text)
    except Exception:
        return PipelineError(text)
    return again if text in str(again) else PipelineError(text)
