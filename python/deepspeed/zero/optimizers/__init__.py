"""The optimizer objects of all stages, and the step."""
