#!/usr/bin/env bash
# Train on all devices of this node, detached from the terminal, with the log in a file.
#
#     scripts/launch_node.sh model=pythia28 loss=dpo trainer=FSDPTrainer ...
#
# The environment of scripts/quickstart (.venv) is used if it is there, else the current one. Stop it with
# `kill PID`: it saves, and `python train.py resume=RUN_FOLDER` goes on.
set -euo pipefail
cd "$(dirname "$0")/.."

python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
log=${LOG:-train_$(date +%Y-%m-%d_%H-%M-%S).log}

# Sharded loading of large models opens many files at once.
ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
nohup "$python" -u train.py "$@" >"$log" 2>&1 </dev/null &
echo "process $!, log $log"
