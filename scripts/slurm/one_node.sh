#!/usr/bin/env bash
#SBATCH --job-name=preferences
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
# One node, all its GPUs:   sbatch scripts/slurm/one_node.sh model=pythia28 loss=dpo trainer=FSDPTrainer exp_name=NAME
#
# Five minutes before the time is up the run gets SIGUSR1, saves and ends with code 75; the job is then requeued and goes
# on from there by itself (resume=auto).
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"

python=python3
[ -x .venv/bin/python ] && python=.venv/bin/python
# train.py starts one process a GPU by itself; it must not take this single task for a rank of a larger world.
unset SLURM_PROCID SLURM_NTASKS SLURM_LOCALID
"$python" -u train.py "$@" resume=auto &
child=$!
trap 'kill -USR1 $child' USR1
trap 'kill -TERM $child' TERM
code=0
wait $child || code=$?
# A signal interrupts the first wait; the run's own code comes from the second.
while kill -0 $child 2>/dev/null; do code=0; wait $child || code=$?; done
if [ $code -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit $code
