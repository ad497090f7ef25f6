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
source /repo/bin/setup.sh && setup_python && setup_job -N 2 --walltime-margin 90 || exit
export WORDRUN_RUN_ID=20260102-030405-abcd
export WORDRUN_RESUME=auto

# qdel and the time limit signal this shell too: then the ranks save, and the job is over
trap 'ending=yes' TERM
launch -N 2 --walltime-margin 90 -- python -m wordrun train.max_iters=5
status=$?
if [ "$status" -eq 75 ] && [ -z "${ending-}" ]; then
  echo "saved: submit this script again to continue"
fi
exit "$status"
