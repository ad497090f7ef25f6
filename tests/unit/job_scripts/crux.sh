#!/bin/bash --login
# ALCF Crux, 256 nodes of 128 cores without GPUs; written by launch --submit
#PBS -N wordrun
#PBS -A X
#PBS -q debug
#PBS -l select=2:system=crux
#PBS -l walltime=0:30:00
#PBS -l filesystems=home:eagle
#PBS -l place=scatter
#PBS -j oe
#PBS -r n

cd '/p/my runs' || exit
export PATH=/no/venv/bin:$PATH
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -N 2 --walltime-margin 120.0 -- python -m wordrun train.max_iters=5
