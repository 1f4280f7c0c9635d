"""The engine's part that builds data loaders and counts samples."""

import torch

from deepspeed.published.dataloader import DeepSpeedDataLoader

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"


class TrainingData:
    """Mixed into the engine."""

    @staticmethod
    def is_map_style_dataset(obj):
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    def is_iterable_style_dataset(obj):
        return isinstance(obj, torch.utils.data.IterableDataset)

    def set_data_post_process_func(self, post_process_func):
        """``post_process_func(batch, sampler_state)`` is applied to each batch of the training loader."""
        if self.training_dataloader is None:
            raise RuntimeError(
                "set_data_post_process_func needs a training loader: pass training_data to deepspeed.initialize"
            )
        self.training_dataloader.post_process_func = post_process_func

    def deepspeed_io(
        self,
        dataset,
        batch_size=None,
        route=ROUTE_TRAIN,
        pin_memory=True,
        data_sampler=None,
        collate_fn=None,
        num_local_io_workers=None,
    ):
        """A loader over ``dataset`` that gives each data-parallel rank its own part.

        ``batch_size`` samples per rank and batch, the micro batch by default. ``route`` other than ``"train"`` gives
        the samples in order instead of shuffled.
        """
        if not (self.is_map_style_dataset(dataset) or self.is_iterable_style_dataset(dataset)):
            raise ValueError(
                f"training_data is a {type(dataset).__name__}: it must be a torch dataset, with __getitem__ and "
                "__len__, or an IterableDataset"
            )
        if data_sampler is None and route in (ROUTE_EVAL, ROUTE_PREDICT) and self.is_map_style_dataset(dataset):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self.dp_world_size, rank=self.parallel.dp_rank, shuffle=False
            )
        return DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=batch_size or self.train_micro_batch_size_per_gpu(),
            pin_memory=pin_memory,
            local_rank=self.local_rank,
            tput_timer=getattr(self, "tput_timer", None),
            collate_fn=collate_fn or self.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.dp_world_size,
            data_parallel_rank=self.parallel.dp_rank,
            dataloader_drop_last=self.dataloader_drop_last(),
        )

    # ---- how many samples -------------------------------------------------------------------------------------------
    def set_train_batch_size(self, train_batch_size):
        """Changes the accumulation steps so that the whole batch is ``train_batch_size``; it must divide evenly."""
        per_micro_step = self.train_micro_batch_size_per_gpu() * self.dp_world_size
        if train_batch_size % per_micro_step != 0:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not divisible by micro batch "
                f"{self.train_micro_batch_size_per_gpu()} x "
                f"data-parallel size {self.dp_world_size} = {per_micro_step}"
            )
        self._config.train_batch_size = train_batch_size
        self._config.gradient_accumulation_steps = train_batch_size // per_micro_step
        if self.core is not None:
            self.core.set_grad_dtype(self._grad_dtype)  # what accumulates now may be another type

    def set_train_micro_batch_size(self, micro_batch_size):
        """Changes the micro batch; accumulation stays, the whole batch follows."""
        self._config.train_micro_batch_size_per_gpu = micro_batch_size
        self._config.train_batch_size = micro_batch_size * self.gradient_accumulation_steps() * self.dp_world_size

    def _samples_of_step(self):
        """Samples that all ranks have put into this step: where the caller owns the boundary, one micro-batch for each
        forward since the last step (at least one), as many on every rank as on this one."""
        if self.managed_gradient_accumulation():
            return self.train_batch_size()
        return max(1, self._micro_batches) * self.train_micro_batch_size_per_gpu() * self.dp_world_size
