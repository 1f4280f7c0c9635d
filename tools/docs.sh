#!/usr/bin/env bash
# tools/docs.sh: writes docs/files.md from the first sentence of each file, docs/config.md from the Field lines in csrc/config.
. "$(dirname "$0")/common.sh"
tools/build.sh native
pick_python
"$PY" tools/files_page.py || die "docs/files.md could not be written (see above)."
PYTHONPATH=$ROOT/python "$PY" -m deepspeed.config.cli docs >docs/config.md.new && mv docs/config.md.new docs/config.md ||
  die "docs/config.md could not be written (see above)."
say "docs/config.md and docs/files.md are up to date"
