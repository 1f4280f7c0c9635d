"""``python -m deepspeed.env_report``."""

import sys

from deepspeed.env_report import cli_main

sys.exit(cli_main())
