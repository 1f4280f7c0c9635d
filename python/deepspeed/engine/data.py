"""The engine's part that builds data loaders."""

import torch

from deepspeed.engine.dataloader import DeepSpeedDataLoader

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
