"""Batches of a data set for the ranks of a job."""
