"""What a model costs and what a run does: operations, phases of steps, traces."""
