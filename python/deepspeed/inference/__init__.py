"""Inference."""
