"""Activation checkpointing: save a segment's inputs instead of its activations, and compute it again in backward."""
