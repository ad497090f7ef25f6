#!/bin/bash --login
# MIT Engaging, shared nodes with different GPUs; written by launch --submit
#SBATCH --job-name=wordrun
#SBATCH --account=X
#SBATCH --partition=mit_normal_gpu
#SBATCH --nodes=1
#SBATCH --time=0:30:00
#SBATCH --ntasks-per-node=2
#SBATCH --gres=gpu:2
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=wordrun-%j.out

cd '/p/my runs' || exit
module load miniforge
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -N 1 --ppn 2 -- python -m wordrun train.max_iters=5
