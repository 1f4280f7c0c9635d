"""Optimizer parts that are not tied to a ZeRO stage: learning-rate schedules, loss scalers."""
