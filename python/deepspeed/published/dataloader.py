"""The published data loader."""

from deepspeed.data.loader import ResumableDataLoader

# Keys of deepspeed_dataloader_config. Ranks agree without a group of theirs, so those of ranks are not needed.
_KEYS = (
    "curriculum_learning", "data_efficiency", "data_parallel_group", "gradient_accumulation_steps", "global_rank",
    "num_workers",
)  # fmt: skip


class DeepSpeedDataLoader(ResumableDataLoader):
    """Batches of this rank's share of a data set, epoch after epoch, with a position that can be saved.

    The base class tells of the arguments. ``local_rank``: accepted for older scripts; the share depends on the
    data-parallel rank alone. ``deepspeed_dataloader_config``: empty, or ``{"curriculum_learning": True,
    "data_efficiency": the section of that name, "gradient_accumulation_steps": n, "num_workers": n}`` for the sampler
    of a curriculum.
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
        given = deepspeed_dataloader_config
        unknown = sorted(set(given) - set(_KEYS))
        if unknown:
            raise ValueError(f"deepspeed_dataloader_config has {', '.join(unknown)}; its keys are {', '.join(_KEYS)}")
        curriculum = None
        if given.get("curriculum_learning"):
            missing = [key for key in ("data_efficiency", "gradient_accumulation_steps") if key not in given]
            if missing:
                raise ValueError(f"deepspeed_dataloader_config lacks {', '.join(missing)}: a curriculum needs them")
            section = given["data_efficiency"]
            steps, seed = given["gradient_accumulation_steps"], section.get("seed", 1234)
            curriculum = {"settings": section["data_sampling"], "accumulation_steps": steps, "seed": seed}
        if num_local_io_workers is None:
            num_local_io_workers = given.get("num_workers")
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
            curriculum,
        )
