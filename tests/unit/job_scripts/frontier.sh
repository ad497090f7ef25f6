#!/bin/bash --login
# OLCF Frontier, nodes of 8 MI250X dies and 56 usable cores; written by launch --submit
#SBATCH --job-name=wordrun
#SBATCH --account=X
#SBATCH --partition=batch
#SBATCH --nodes=2
#SBATCH --time=0:30:00
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=7
#SBATCH --gpus-per-node=8
#SBATCH --network=disable_rdzv_get
#SBATCH -S 8
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=wordrun-%j.out

cd '/p/my runs' || exit
module load PrgEnv-gnu/8.7.0 cpe/26.03 rocm/7.1.1 craype-accel-amd-gfx90a
module load rccl-net-plugin
source /repo/bin/setup.sh && setup_python && setup_job -N 2 || exit
export WORDRUN_RUN_ID=20260102-030405-abcd
export WORDRUN_RESUME=auto

# scancel and the time limit signal this shell too: then the ranks save, and the job is over
trap 'ending=yes' TERM
launch -N 2 -- python -m wordrun train.max_iters=5
status=$?
if [ "$status" -eq 75 ] && [ -z "${ending-}" ]; then
  if scontrol requeue "$SLURM_JOB_ID"; then echo "saved: SLURM requeues this job"
  else echo "saved, but SLURM does not requeue this job: submit this script again to continue"; fi
fi
exit "$status"
