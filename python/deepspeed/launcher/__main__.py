"""``python -m deepspeed.launcher`` is the program ``deepspeed``."""

import sys

from deepspeed.launcher.runner import cli_main

sys.exit(cli_main())
