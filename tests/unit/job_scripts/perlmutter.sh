#!/bin/bash --login
# NERSC Perlmutter, GPU nodes of 4 A100; written by launch --submit
#SBATCH --job-name=wordrun
#SBATCH --account=X
#SBATCH --qos=regular
#SBATCH --nodes=2
#SBATCH --time=0:30:00
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --gpus-per-node=4
#SBATCH --constraint=gpu
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=wordrun-%j.out

cd '/p/my runs' || exit
export PATH=/no/venv/bin:$PATH
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -N 2 -- python -m wordrun train.max_iters=5
