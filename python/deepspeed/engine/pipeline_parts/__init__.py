"""The parts that engines of pipelines have beside those of every engine: files register them as in ``parts``."""
