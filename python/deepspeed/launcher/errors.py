"""Errors that the user must correct before a job can start."""


class LaunchError(RuntimeError):
    """The job was not started; the text is one paragraph that names the thing and the fix."""
