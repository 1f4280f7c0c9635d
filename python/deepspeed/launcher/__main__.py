"""``python -m deepspeed.launcher`` is the program ``deepspeed``."""

import sys

from deepspeed.launcher.runner import main

sys.exit(main())
