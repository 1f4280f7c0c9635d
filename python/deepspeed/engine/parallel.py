"""Which ranks train the same parameters: process groups and sizes, from ``mpu`` where the caller brings one."""

from deepspeed import comm as dist


class Parallel:
    """Groups of this rank. Without ``mpu`` all ranks are data parallel."""

    def __init__(self, mpu=None):
        self.mpu = mpu
        self.world_size = dist.get_world_size() if dist.is_initialized() else 1
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        if mpu is None:
            self.dp_group = dist.get_world_group() if dist.is_initialized() else None
            self.dp_world_size, self.dp_rank = self.world_size, self.rank
            self.mp_group, self.mp_world_size, self.mp_rank = None, 1, 0
            return
        self.dp_group = mpu.get_data_parallel_group()
        self.dp_world_size = mpu.get_data_parallel_world_size()
        self.dp_rank = mpu.get_data_parallel_rank()
        self.mp_world_size = self._first(mpu, "world_size") or 1
        self.mp_rank = self._first(mpu, "rank") or 0
        self.mp_group = self._first(mpu, "group") if self.mp_world_size > 1 else None

    @staticmethod
    def _first(mpu, what):
        for kind in ("tensor_model_parallel", "model_parallel", "slice_parallel"):
            method = getattr(mpu, f"get_{kind}_{what}", None)
            if method is not None:
                return method()
        return None

    def counts_in_norm(self, param):
        """Parameters that every model-parallel rank holds count on the first one only."""
        split = getattr(param, "model_parallel", False) or getattr(param, "tensor_model_parallel", False)
        return self.mp_rank == 0 or split

    def second_group(self):
        """Another group of the same data-parallel ranks, for traffic whose order differs from the first one's."""
        if self.dp_world_size == 1:
            return None
        if self.mpu is None:
            return dist.new_group(list(range(self.world_size)))
        return self.dp_group  # making one needs every rank of the job, of which this rank knows only its own group

    def source_rank(self):
        """Global rank of the data-parallel rank 0 of this rank's group."""
        return dist.get_global_rank(self.dp_group, 0) if self.dp_world_size > 1 else self.rank
