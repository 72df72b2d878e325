#!/usr/bin/env bash
#SBATCH --job-name=preferences
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=USR1@300
# Several nodes, one task a GPU:   sbatch --nodes=4 scripts/slurm/many_nodes.sh model=pythia69 loss=dpo trainer=FSDPTrainer
#
# Every task is one rank and joins the world that srun describes. local_dirs must be on a file system that all nodes
# share. Preemption as in one_node.sh.
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

export MASTER_ADDR MASTER_PORT
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python

code=0
srun --kill-on-bad-exit=1 "$python" -u train.py "$@" resume=auto || code=$?
if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $code
