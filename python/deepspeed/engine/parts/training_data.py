"""The engine's part that builds data loaders and counts samples."""

import weakref

import torch

from deepspeed import comm as dist
from deepspeed.data.loader import ResumableDataLoader
from deepspeed.engine.members import Part, engine_parts, member
from deepspeed.published.dataloader import DeepSpeedDataLoader
from deepspeed.utils.repeating_loader import RepeatingLoader

ROUTE_TRAIN = "train"
ROUTE_EVAL = "eval"
ROUTE_PREDICT = "predict"


@engine_parts.add("_data")
class TrainingData(Part):
    """A part of the engine."""

    _seed = None  # see ``agree_on_seed``
    last_samples = 0  # of the last step, over all ranks
    _loader = _position = None  # the loader, and its position at the beginning of the accumulation window

    def __init__(self, engine):
        super().__init__(engine)
        self._following = weakref.WeakSet()  # training loaders of the micro-batch size, which change with it

    def agree_on_seed(self):
        """Makes ranks with the same samples (stages of a pipeline, ranks that share weights or sequences) draw the same
        random numbers for them, even if their seeds differ. All ranks call it once."""
        parallel = self.engine.parallel
        for group in (parallel.mp_group, parallel.sp_group):
            if group is not None:
                told = [torch.initial_seed() if self._seed is None else self._seed]
                dist.broadcast_object_list(told, dist.get_global_rank(group, 0), group=group)
                self._seed = told[0]

    def start_window(self):
        """Called at the beginning of each accumulation window, because a checkpoint in the middle of the window resumes
        with the window's data. Loaders of the user do not need it: only pipelines have them, and they take whole
        windows."""
        loader = self.engine.training_dataloader
        self._loader = loader if isinstance(loader, ResumableDataLoader) else None
        self._position = None if self._loader is None else self.position()

    def after_micro_step(self, boundary):
        if boundary:
            self.start_window()

    def after_load(self):
        self.start_window()

    def position(self, at_window=False):
        """The position in the training data now, or at the beginning of the accumulation window. None if there is no
        data."""
        loader = self.engine.training_dataloader
        if at_window and loader is not None and loader is self._loader:
            return self._position
        return loader.state_dict() if hasattr(loader, "state_dict") else None

    @staticmethod
    @member
    def is_map_style_dataset(obj):
        return hasattr(obj, "__getitem__") and hasattr(obj, "__len__")

    @staticmethod
    @member
    def is_iterable_style_dataset(obj):
        return isinstance(obj, torch.utils.data.IterableDataset)

    @member
    def set_data_post_process_func(self, post_process_func):
        """Each batch of the training loader becomes ``post_process_func(batch, sampler_state)``. The state of a
        curriculum has the key ``current_difficulties``: ``{metric: difficulty}`` of this batch."""
        self._own_loader("set_data_post_process_func").post_process_func = post_process_func

    @member
    def set_custom_curriculum_learning_schedule(self, schedule_func_dict):
        """``{metric: function}`` for metrics with schedule_type "custom". ``function(step)`` returns the difficulty of
        a step, and must depend on the step alone. The first step is 1."""
        loader = self._own_loader("set_custom_curriculum_learning_schedule")
        if loader.curriculum is None:
            raise RuntimeError(
                "set_custom_curriculum_learning_schedule needs a curriculum: enable data_efficiency, data_sampling in "
                "it, and curriculum_learning in data_sampling"
            )
        loader.set_curriculum_schedules(schedule_func_dict)

    def _own_loader(self, asked):
        loader = self.engine.training_dataloader
        while isinstance(loader, RepeatingLoader):
            loader = loader.loader
        if not isinstance(loader, ResumableDataLoader):
            given = "none" if loader is None else f"a {type(loader).__name__}"
            raise RuntimeError(
                f"{asked} needs a training loader of this library, and there is {given}: pass training_data to "
                "deepspeed.initialize, or create a loader with engine.deepspeed_io"
            )
        return loader

    def _curriculum(self, route):
        """The ``deepspeed_dataloader_config`` of a loader for this route."""
        engine, sampling = self.engine, self.engine.data_sampling_config()
        if route != ROUTE_TRAIN or not (engine.data_efficiency_enabled() and sampling["enabled"]):
            return {}
        config = {"num_workers": sampling["num_workers"]}
        if sampling["curriculum_learning"]["enabled"]:
            config["curriculum_learning"], config["data_efficiency"] = True, engine.data_efficiency_config()
            config["gradient_accumulation_steps"] = engine.gradient_accumulation_steps()
        return config

    @member
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

        ``batch_size``: samples per rank and batch; the default is the micro-batch size. With another ``route`` than
        ``"train"`` the samples come in order instead of shuffled.
        """
        if not (self.engine.is_map_style_dataset(dataset) or self.engine.is_iterable_style_dataset(dataset)):
            raise ValueError(
                f"training_data is a {type(dataset).__name__}: it must be a torch dataset, with __getitem__ and "
                "__len__, or an IterableDataset"
            )
        if data_sampler is None and route in (ROUTE_EVAL, ROUTE_PREDICT) and self.engine.is_map_style_dataset(dataset):
            data_sampler = torch.utils.data.DistributedSampler(
                dataset, num_replicas=self.engine.dp_world_size, rank=self.engine.parallel.data_rank, shuffle=False
            )
        config, micro = self._curriculum(route), self.engine.train_micro_batch_size_per_gpu()
        loader = DeepSpeedDataLoader(
            dataset=dataset,
            batch_size=micro if batch_size is None else batch_size,
            pin_memory=self.engine.data_sampling_config()["pin_memory"] if config else pin_memory,
            local_rank=self.engine.local_rank,
            tput_timer=self.engine.progress.throughput if route == ROUTE_TRAIN else None,
            collate_fn=collate_fn or self.engine.collate_fn,
            num_local_io_workers=num_local_io_workers,
            data_sampler=data_sampler,
            data_parallel_world_size=self.engine.dp_world_size,
            data_parallel_rank=self.engine.parallel.data_rank,
            dataloader_drop_last=self.engine.dataloader_drop_last(),
            deepspeed_dataloader_config=config,
        )
        loader.seed = self._seed
        loader.phases = self.engine._step_log.phases
        if route == ROUTE_TRAIN and loader.batch_size == micro:
            self._following.add(loader)
        if route == ROUTE_TRAIN and self.engine._curriculum.cuts_loaders:
            loader.cut = self.engine._curriculum.cut
        return loader

    def tell_length_of_epoch(self):
        """Tells the core the number of steps of an epoch, which zero_optimization.zenflow needs."""
        engine = self.engine
        if engine.core is None or not engine.core.strategy_states() or engine.training_dataloader is None:
            return
        try:
            loader = engine.training_dataloader
            curriculum = getattr(loader, "curriculum", None)  # a loop over it has several epochs
            batches = len(loader) // (1 if curriculum is None else curriculum.num_epochs)
        except TypeError:  # data without a length: zenflow.steps_per_epoch says it, or steps count
            return
        engine.core.set_steps_per_epoch(max(1, batches // engine.gradient_accumulation_steps()))

    # ---- how many samples -------------------------------------------------------------------------------------------
    @member
    def set_train_batch_size(self, train_batch_size):
        """Changes the accumulation steps so that the whole batch is ``train_batch_size``; it must divide evenly."""
        per_micro_step = self.engine.train_micro_batch_size_per_gpu() * self.engine.dp_world_size
        if train_batch_size % per_micro_step != 0:
            raise ValueError(
                f"train_batch_size {train_batch_size} is not divisible by micro batch "
                f"{self.engine.train_micro_batch_size_per_gpu()} x "
                f"data-parallel size {self.engine.dp_world_size} = {per_micro_step}"
            )
        self.engine._accumulation.need_no_window(f"set_train_batch_size({train_batch_size})")
        self._check_sizes(self.engine.train_micro_batch_size_per_gpu(), train_batch_size // per_micro_step)
        self.engine._config.change(
            "set_train_batch_size()",
            train_batch_size=train_batch_size,
            gradient_accumulation_steps=train_batch_size // per_micro_step,
        )
        self._sizes_have_changed()

    @member
    def set_train_micro_batch_size(self, micro_batch_size):
        """Changes the micro batch; accumulation stays, the whole batch follows. Training loaders of this engine that
        have the size up to now give batches of the new size, from the sample on that comes next."""
        self.engine._accumulation.need_no_window(f"set_train_micro_batch_size({micro_batch_size})")
        self._check_sizes(micro_batch_size, self.engine.gradient_accumulation_steps())
        parts = self.engine.gradient_accumulation_steps() * self.engine.dp_world_size
        self.engine._config.change(
            "set_train_micro_batch_size()",
            train_micro_batch_size_per_gpu=micro_batch_size,
            train_batch_size=micro_batch_size * parts,
        )
        self._sizes_have_changed()

    def _check_sizes(self, micro_batch_size, accumulation_steps):
        """Raises before anything has changed where a loader cannot give batches of these sizes."""
        for loader in list(self._following):
            loader.check_sizes(micro_batch_size, accumulation_steps)
        if self.engine._dynamic.batches is not None and (
            micro_batch_size != self.engine.train_micro_batch_size_per_gpu()
            or accumulation_steps != self.engine.gradient_accumulation_steps()
        ):
            raise RuntimeError(
                "the sizes of a batch cannot change while the engine trains on dynamic batches, which were made for "
                "the sizes of the configuration: set train_batch_size and train_micro_batch_size_per_gpu there"
            )

    def _sizes_have_changed(self):
        engine = self.engine
        if engine.core is not None:
            engine.core.set_grad_dtype(engine._grad_dtype)  # what accumulates now may be another type
        for loader in list(self._following):
            loader.set_sizes(engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps())
        engine.progress.throughput.batch_size = engine.train_batch_size()
        engine._accumulation.tell()
        self.start_window()

    def samples_of_step(self):
        """The samples of the step under way, over all ranks. Reports read ``last_samples`` after it."""
        engine = self.engine
        known = engine._dynamic.samples()
        if known is not None:
            return known
        return engine._window.micro_batches * engine.train_micro_batch_size_per_gpu() * engine.dp_world_size
