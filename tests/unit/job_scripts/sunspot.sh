#!/bin/bash --login
# ALCF Sunspot, Aurora's test system; written by launch --submit
#PBS -N wordrun
#PBS -A X
#PBS -l select=2
#PBS -l walltime=0:30:00
#PBS -l filesystems=tegu
#PBS -l place=scatter
#PBS -j oe
#PBS -r n

cd '/p/my runs' || exit
module load frameworks
source /repo/bin/setup.sh && setup_python && setup_job || exit

launch -N 2 --walltime-margin 120.0 -- python -m wordrun train.max_iters=5
