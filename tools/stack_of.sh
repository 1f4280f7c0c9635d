#!/usr/bin/env bash
# The calls of the first thread of a process, the innermost first: tools/stack_of.sh PID
set -euo pipefail
eu-stack -1 -p "$1"
