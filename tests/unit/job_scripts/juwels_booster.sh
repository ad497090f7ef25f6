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
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=wordrun-%j.out

cd '/p/my runs' || exit
export PATH=/no/venv/bin:$PATH
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -N 2 -- python -m wordrun train.max_iters=5
