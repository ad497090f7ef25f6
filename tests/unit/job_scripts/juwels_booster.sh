#!/bin/bash --login
# JSC JUWELS Booster, 936 nodes of 4 A100; written by launch --submit
#SBATCH --job-name=wordrun
#SBATCH --account=X
#SBATCH --partition=develbooster
#SBATCH --nodes=2
#SBATCH --time=0:30:00
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=24
#SBATCH --gres=gpu:4
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=wordrun-%j.out

cd '/p/my runs' || exit
module --force purge
module load Stages/2025 GCC OpenMPI CUDA/12 MPI-settings/CUDA Python mpi4py
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
