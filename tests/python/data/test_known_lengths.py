"""Lengths of samples that only some hosts have in a file."""

import numpy
import torch

from deepspeed.data import dynamic_batches


def test_ranks_measure_together_where_one_of_them_lacks_the_file(tmp_path, monkeypatch):
    """Otherwise the rank that lacks the file waits in the exchange of the lengths for the rank that has read it."""
    numpy.save(tmp_path / dynamic_batches.LENGTHS_FILE, numpy.asarray([9, 9]))
    calls = []

    def all_gather_object(to, value):
        calls.append(value)
        to[:] = [value, (False, False)] if len(calls) == 1 else [value, [4]]

    monkeypatch.setattr(dynamic_batches.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dynamic_batches.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dynamic_batches.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dynamic_batches.dist, "all_gather_object", all_gather_object)
    samples = [torch.ones(3), torch.ones(4)]
    source, found = dynamic_batches._known_lengths(samples, str(tmp_path), lambda batch: [batch.shape[1]], None)
    assert calls == [(False, True), [3]] and source == "batch_seqlens_fn" and found.tolist() == [3, 4]
    assert numpy.load(tmp_path / dynamic_batches.LENGTHS_FILE).tolist() == [3, 4]
