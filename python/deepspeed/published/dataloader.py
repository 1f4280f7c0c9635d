"""The published data loader."""

from deepspeed.data.loader import ResumableDataLoader


class DeepSpeedDataLoader(ResumableDataLoader):
    """Batches of this rank's share of a data set, epoch after epoch, with a position that can be saved.

    The base class tells of the arguments. ``local_rank``: accepted for older scripts; the share depends on the
    data-parallel rank alone. ``deepspeed_dataloader_config`` must be empty: curriculum sampling is not part of this
    build.
    """

    def __init__(
        self,
        dataset,
        batch_size,
        pin_memory,
        local_rank,
        tput_timer,
        collate_fn=None,
        num_local_io_workers=None,
        data_sampler=None,
        data_parallel_world_size=None,
        data_parallel_rank=None,
        dataloader_drop_last=False,
        deepspeed_dataloader_config={},  # noqa: B006  (the signature is the contract's; it is only read)
    ):
        if deepspeed_dataloader_config:
            raise NotImplementedError(
                f"this build has no curriculum sampling yet, but the data loader was given "
                f"{', '.join(sorted(map(str, deepspeed_dataloader_config)))}. Leave deepspeed_dataloader_config empty."
            )
        super().__init__(
            dataset,
            batch_size,
            pin_memory,
            tput_timer,
            collate_fn,
            num_local_io_workers,
            data_sampler,
            data_parallel_world_size,
            data_parallel_rank,
            dataloader_drop_last,
        )
