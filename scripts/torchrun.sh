#!/usr/bin/env bash
# Train on several nodes; run it on each of them:
#
#     scripts/torchrun.sh NODES NODE_RANK MEETING_POINT model=... loss=... trainer=FSDPTrainer ...
#
# MEETING_POINT is HOST:PORT of one node that all others reach. PROCESSES sets the processes a node (default: one a
# device, or 1 without devices). All nodes need the same code, files and command.
set -euo pipefail
cd "$(dirname "$0")/.."

if [ $# -lt 4 ]; then
    sed -n '2,8p' "$0" | sed 's/^# \{0,1\}//'
    exit 2
fi
nodes=$1 rank=$2 meeting=$3
shift 3
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
processes=${PROCESSES:-$("$python" -c 'import torch; print(max(1, torch.cuda.device_count()))')}

ulimit -n "$(ulimit -Hn)" 2>/dev/null || true
# Static rendezvous: node 0 waits at the meeting point, no election of who does.
exec "$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$rank" --nproc-per-node "$processes" \
    --master-addr "${meeting%:*}" --master-port "${meeting##*:}" train.py "$@"
