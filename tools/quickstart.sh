#!/usr/bin/env bash
# tools/quickstart.sh [--resume|--restart ...]: everything from a bare machine to a trained GPT.
. "$(dirname "$0")/common.sh"
export DS_CUDA_WHERE_SEEN=1  # CUDA kernels take a sixth of the time of a first build
tools/install.sh rich psutil matplotlib  # the progress bar, memory figures, loss.png
pick_python
exec "$(dirname "$PY")/deepspeed" --num_accelerators 2 examples/quickstart/train.py \
  --deepspeed_config examples/quickstart/ds_config.json "$@"
