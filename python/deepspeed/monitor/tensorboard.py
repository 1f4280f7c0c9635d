"""Metrics in the event files of TensorBoard."""

import os

from deepspeed.log import logger
from deepspeed.monitor.event_file import ScalarWriter
from deepspeed.monitor.monitor import Monitor, checked, folder_of, imported


class TensorBoardMonitor(Monitor):
    """Event files in ``output_path/job_name``, by ``torch.utils.tensorboard`` or, where the package tensorboard is
    missing, by a writer of our own. ``summary_writer``: it, on rank 0 of a monitor that is on."""

    def __init__(self, tensorboard_config):
        super().__init__(tensorboard_config)
        self.output_path, self.job_name = tensorboard_config.output_path, tensorboard_config.job_name
        self.summary_writer = None
        self.get_summary_writer()

    def get_summary_writer(self, base=os.path.join(os.path.expanduser("~"), "tensorboard")):
        """The writer, made at the first call; None on other ranks and where the monitor is off."""
        if self.summary_writer is None and self.writes:
            self.log_dir = folder_of("tensorboard", self, base)
            try:
                self._make = imported("torch.utils.tensorboard", "tensorboard").SummaryWriter
            except Exception as error:  # missing, or unfit for this torch
                reason = error.__cause__ or error
                logger.info("Event files are written without the package tensorboard: %s", reason)
                self._make = ScalarWriter
            self.summary_writer = self._make(log_dir=self.log_dir)
        return self.summary_writer

    def write_events(self, event_list, flush=True):
        if self.summary_writer is None:
            return
        for name, value, step in checked(event_list):
            self.summary_writer.add_scalar(name, value, step)
        if flush:
            self.flush()

    def flush(self):
        if self.summary_writer is not None:
            self.summary_writer.flush()

    def resume(self, step):
        """Begins a file that tells TensorBoard to show nothing that earlier ones have of later steps."""
        if self.summary_writer is not None:
            self.summary_writer.close()
            self.summary_writer = self._make(log_dir=self.log_dir, purge_step=step + 1)

    def close(self):
        if self.summary_writer is not None:
            self.summary_writer.close()
