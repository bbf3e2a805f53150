#!/bin/bash
%options%
# Lines of yours go here (module load …, export NCCL_…): they stay when `tokenformer slurm` writes this file anew.
%begin%
set -u
%setup%
# All nodes meet at the first one, where this runs, on a port of this job below those that systems give to anybody.
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((10000 + SLURM_JOB_ID % 20000))
while (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do  # taken
  port=$((10000 + (port - 9999) % 20000))
done

# Without this a restart after a dead worker fails half of the time.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# USR1 comes before the time is over, TERM before preemption: the ranks save and leave, and the job goes
# back into the queue to go on from there. Only they listen: torchrun would kill them after 30 seconds.
asked=0
trap asked=USR1 USR1
trap asked=TERM TERM
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}  # srun does not ask for what sbatch was given
srun --kill-on-bad-exit=1 --cpu-bind=none %srun%bash -c 'trap "" USR1 TERM; exec "$@"' torchrun \
  %container%%python% -m torch.distributed.run --signals-to-handle=SIGINT \
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
# The ranks, the script or both get TERM before preemption, but also from scancel, after which nothing goes on.
preempted=$(scontrol show job "$SLURM_JOB_ID" | grep -c 'PreemptTime=[0-9]')
tail -n 1 %run%/log | grep -q 'stopped by SIG' && [ "$preempted" = 1 ] && asked=USR1
if [ "$asked" = USR1 ]; then
  scontrol requeue "$SLURM_JOB_ID" && sleep 60  # until Slurm takes it
fi
exit "$code"
%end%
