#!/bin/bash --login
# ALCF Sophia, 24 DGX A100 of 8 GPUs; written by launch --submit
#PBS -N wordrun
#PBS -A X
#PBS -q by-gpu
#PBS -l select=4
#PBS -l walltime=0:30:00
#PBS -l filesystems=home:eagle
#PBS -j oe
#PBS -r n

cd '/p/my runs' || exit
module use /soft/modulefiles
module load conda
conda activate base
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -n 4 --walltime-margin 120.0 -- python -m wordrun train.max_iters=5
