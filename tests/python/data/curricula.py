"""Data sets with an analysis, and curricula over them, for tests."""

import os

import numpy

from deepspeed.data.analyzer import DataAnalyzer


class Rows:
    """Rows of a number: row i is i. ``values``: what metrics say of row i, by metric."""

    def __init__(self, **values):
        self.values = {name: numpy.asarray(one) for name, one in values.items()}
        self.length = len(next(iter(self.values.values())))

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        return i

    def analyzer(self, folder, **options):
        names = list(self.values)
        given = {
            "metric_names": names,
            "metric_functions": [lambda batch, name=name: self.values[name][numpy.asarray(batch)] for name in names],
            "metric_types": ["single_value_per_sample"] * len(names),
            "metric_dtypes": [numpy.int64] * len(names),
            "save_path": str(folder),
            "batch_size": 7,
        }
        return DataAnalyzer(self, **{**given, **options})

    def analysed(self, folder, **options):
        """The data set, after its analysis below ``folder``."""
        analyzer = self.analyzer(folder, **options)
        analyzer.run_map()
        analyzer.run_reduce()
        return self


def metric(folder, name, low, high, total, step=1, **more):
    """The section of one metric: a linear schedule."""
    path = os.path.join(folder, name, name)
    return {
        "index_to_sample_path": f"{path}_index_to_sample",
        "index_to_metric_path": f"{path}_index_to_metric",
        "difficulty_type": "value",
        "clustering_type": "schedule_based",
        "min_difficulty": low,
        "max_difficulty": high,
        "schedule_type": "fixed_linear",
        "schedule_config": {"total_curriculum_step": total, "difficulty_step": step},
        **more,
    }


def sampling(folder, metrics, num_epochs=3, **more):
    """The section ``data_sampling``."""
    curriculum = {"enabled": True, "data_cluster_path": str(folder), "curriculum_metrics": metrics}
    return {"enabled": True, "num_epochs": num_epochs, "curriculum_learning": curriculum, **more}
