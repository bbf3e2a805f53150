#!/bin/bash
# Written by `tokenformer slurm`. Submit it from where you would train: sbatch FILE
%options%
#SBATCH --requeue
set -u

# All nodes meet at the first one, on a port that belongs to this job.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))

# Without this a restart after a dead worker fails half of the time.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# USR1 comes before the time is over, TERM before preemption: the ranks save and leave, and the job goes
# back into the queue to go on from there. Only they listen: torchrun would kill them after 30 seconds.
asked=0
trap asked=1 USR1 TERM
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not ask for what sbatch was given
srun --kill-on-bad-exit=1 --cpu-bind=none bash -c 'trap "" USR1 TERM; exec "$@"' torchrun \
  %python% -m torch.distributed.run --signals-to-handle=SIGINT \
  --nnodes=%nodes% --nproc-per-node=%processes% --max-restarts=%restarts% \
  --rdzv-backend=c10d --rdzv-endpoint="$head:$port" \
  --rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
  -m tokenformer %train% &
step=$!
while kill -0 "$step" 2>/dev/null; do
  if [ "$asked" = 0 ]; then wait "$step"; continue; fi  # a signal ends the wait
  scancel --signal=USR1 "$SLURM_JOB_ID.0" 2>/dev/null  # until they have heard it
  sleep 5
done
wait "$step"
code=$?
# A signal before preemption may come to the ranks alone: then the run's log says so.
if [ "$asked" = 1 ] || tail -n 1 %run%/log | grep -q 'stopped by SIG'; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm takes it
fi
exit "$code"
