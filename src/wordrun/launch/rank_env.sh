#!/bin/sh
# Runs a command as one rank, with torchrun's variables set from the launcher's.
# usage: rank_env.sh COMMAND...   (launch exports WORDRUN_LAUNCHER, WORDRUN_WORLD_SIZE and WORDRUN_STATUS_DIR, and
# WORDRUN_IGNORE_USR1 for a COMMAND that handles SIGUSR1, which would otherwise kill it until its handler is set)
#
# Reads only one family of variables, never writes PMI_* (MPI would fail), and needs only sh. The same families
# are in dist/world.py, in the same order; a test compares them.

[ -z "${WORDRUN_IGNORE_USR1-}" ] || trap '' USR1

_counts=
case ${WORDRUN_LAUNCHER-} in
  torchrun) # sets the other four itself
    NODE_RANK=${GROUP_RANK-}
    ;;
  srun)
    RANK=${SLURM_PROCID-} WORLD_SIZE=${SLURM_STEP_NUM_TASKS-}
    LOCAL_RANK=${SLURM_LOCALID-} NODE_RANK=${SLURM_NODEID-} LOCAL_WORLD_SIZE=
    _counts=${SLURM_STEP_TASKS_PER_NODE-}
    ;;
  pals) # sets no world size
    RANK=${PALS_RANKID-} WORLD_SIZE=${WORDRUN_WORLD_SIZE-}
    LOCAL_RANK=${PALS_LOCAL_RANKID-} LOCAL_WORLD_SIZE=${PALS_LOCAL_SIZE-} NODE_RANK=${PALS_NODEID-}
    ;;
  openmpi)
    RANK=${OMPI_COMM_WORLD_RANK-} WORLD_SIZE=${OMPI_COMM_WORLD_SIZE-}
    LOCAL_RANK=${OMPI_COMM_WORLD_LOCAL_RANK-} LOCAL_WORLD_SIZE=${OMPI_COMM_WORLD_LOCAL_SIZE-} NODE_RANK=
    _counts=${WORDRUN_LAYOUT-}
    ;;
  hydra)
    RANK=${PMI_RANK-} WORLD_SIZE=${PMI_SIZE-}
    LOCAL_RANK=${MPI_LOCALRANKID-} LOCAL_WORLD_SIZE=${MPI_LOCALNRANKS-} NODE_RANK=
    _counts=${WORDRUN_LAYOUT-} _hosts=,${WORDRUN_HOSTS-},
    case $_hosts in
      *",${PMI_HOSTNAME:-.},"*) # MPICH names the rank's host, wherever --launcher-args may have placed it
        _hosts=${_hosts%%",$PMI_HOSTNAME,"*} IFS=,
        count() { NODE_RANK=$#; }
        # shellcheck disable=SC2086 # a word for each host before this one
        count ${_hosts#,}
        unset IFS
        ;;
    esac
    ;;
  *)
    echo "launch: rank_env.sh does not know the launcher '${WORDRUN_LAUNCHER-}' (WORDRUN_LAUNCHER)" >&2
    exit 2
    ;;
esac

# Ranks are numbered from node to node, and "4(x2),3" stands for 4, 4 and 3 of them. srun says only which node this is,
# and other launchers only how many ranks it has.
_node=0 _first=0 _rest=${_counts:+$_counts,} _count=
while [ -n "$_rest" ] && [ -n "$RANK" ]; do
  _count=${_rest%%,*} _rest=${_rest#*,} _times=1
  case $_count in *"(x"*) _times=${_count#*"(x"} _times=${_times%")"} _count=${_count%%"("*} ;; esac
  _at=$(((RANK - _first) / _count))
  [ -z "$NODE_RANK" ] || _at=$((NODE_RANK - _node))
  [ "$_at" -ge "$_times" ] || break
  _node=$((_node + _times)) _first=$((_first + _times * _count)) _count=
done
if [ -n "$_count" ] && [ -z "$LOCAL_WORLD_SIZE" ]; then
  LOCAL_WORLD_SIZE=$_count
elif [ -n "$_count" ] && [ -z "$NODE_RANK" ] && [ "$LOCAL_WORLD_SIZE $LOCAL_RANK" = "$_count $(((RANK - _first) % _count))" ]; then
  NODE_RANK=$((_node + _at))
fi

if [ -z "${RANK-}" ] || [ -z "${WORLD_SIZE-}" ] || [ -z "${LOCAL_RANK-}" ] || [ -z "${LOCAL_WORLD_SIZE-}" ]; then
  echo "launch: $WORDRUN_LAUNCHER does not say which rank this is: RANK='${RANK-}' WORLD_SIZE='${WORLD_SIZE-}'" \
    "LOCAL_RANK='${LOCAL_RANK-}' LOCAL_WORLD_SIZE='${LOCAL_WORLD_SIZE-}'. Is another launcher of that name in PATH?" >&2
  exit 2
fi
if [ -z "$NODE_RANK" ]; then # correct for ranks laid out in even blocks
  NODE_RANK=$(((RANK - LOCAL_RANK) / LOCAL_WORLD_SIZE))
  [ -z "$_counts" ] || [ "$LOCAL_RANK" != 0 ] || echo "launch: rank $RANK is not where launch wanted it ($_counts ranks" \
    "per host), perhaps by --launcher-args, so its NODE_RANK=$NODE_RANK and those of others may be wrong" >&2
fi
unset _counts _hosts _node _first _rest _count _times _at
export RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK
# Further variables of torchrun that scripts read; not TORCHELASTIC_RUN_ID, by which torch recognizes torchrun's ranks.
export GROUP_RANK="$NODE_RANK" ROLE_RANK="${ROLE_RANK:-$RANK}"
export TORCHELASTIC_RESTART_COUNT="${TORCHELASTIC_RESTART_COUNT:-0}" TORCHELASTIC_MAX_RESTARTS="${TORCHELASTIC_MAX_RESTARTS:-0}"

# Rank 0 reads launch's stdin: from a pipe that launch fills or, on another host, from files stdin.0, stdin.1 and so on,
# of which an empty one is the last. Without these, it reads the launcher's stdin.
_stdin=${WORDRUN_STATUS_DIR-}/stdin
if [ "$RANK" != 0 ]; then
  exec </dev/null
elif [ -e "$_stdin" ]; then
  _pipe=${TMPDIR:-/tmp}/wordrun-$$.in
  mkfifo -m 600 "$_pipe" && : >"$_stdin.seen" || exit
  (
    number=0
    while [ -d "$WORDRUN_STATUS_DIR" ]; do
      if [ ! -e "$_stdin.$number" ]; then
        sleep 0.1
      elif [ -s "$_stdin.$number" ]; then
        cat "$_stdin.$number" && rm "$_stdin.$number" || exit
        number=$((number + 1))
      else
        exit
      fi
    done
  ) >"$_pipe" 2>/dev/null &
  exec <"$_pipe"
  rm "$_pipe"
else
  _pipe=${WORDRUN_STATUS_DIR-}/$(uname -n).in
  [ ! -p "$_pipe" ] || exec <"$_pipe"
fi
unset _stdin _pipe

[ -n "${WORDRUN_STATUS_DIR-}" ] || exec "$@"
export WORDRUN_UNFINISHED="${TMPDIR:-/tmp}/wordrun-${WORDRUN_LAUNCH_ID-}-$RANK"

# mpiexec and torchrun mix up the ranks' exit statuses (Hydra ORs them, including the 9 of ranks it killed), so this
# shell stays to report how its rank ends. Signals reach the entire group; it waits for the command to act on them.
trap : HUP INT TERM USR2 ABRT
[ -n "${WORDRUN_IGNORE_USR1-}" ] || trap : USR1
run() { # in a subshell, which these signals end; launch creates the file before it forwards a signal that stops ranks
  [ ! -e "$WORDRUN_STATUS_DIR/stopped" ] || exit 130
  exec "$@"
}
exec 3>&2 2>/dev/null # otherwise this shell, as well as launch, would report a signal that ends its rank ("Killed")
if [ -p "$WORDRUN_STATUS_DIR/$RANK.err" ]; then # each rank has its own pipes, so that lines do not mix
  echo "$$" >"$WORDRUN_STATUS_DIR/$RANK.pid" # by this file, launch notices if this shell was killed
  (run "$@") >"$WORDRUN_STATUS_DIR/$RANK.out" 2>"$WORDRUN_STATUS_DIR/$RANK.err" 3>&-
else
  (run "$@") 2>&3 3>&-
fi
status=$?
host=${SLURMD_NODENAME:-$(uname -n)}
name=$RANK report="$status $host" exits=$status
set -- "$WORDRUN_UNFINISHED"-*
if [ -e "$1" ]; then # a process of wordrun has ended without having finished
  rm -f "$@"
  [ "$status" -ne 0 ] || exits=1
elif [ "$status" -eq 0 ]; then
  name=ended-$host report=$RANK # one file for all ranks of a host
fi
if echo "$report" >>"$WORDRUN_STATUS_DIR/$name"; then
  # 75 is not a failure: the rank stopped on request and has saved. A launcher would kill the others if it saw the 75.
  [ "$status" -ne 75 ] || exit 0
else # this host does not have the folder, or its disk is full: launch takes this line out of the output
  echo "launch ${WORDRUN_LAUNCH_ID-}: $name $report" >&3
fi
exit "$exits"
