# shellcheck shell=bash
# Shell helpers, to be sourced in bash or zsh:
#
#   source bin/setup.sh && setup_python && setup_job
#
# setup_python   finds or makes the Python environment, checks it, and puts it first in PATH
# setup_job      prints who, where, when, and what launch would use
#
# Each returns non-zero and says why when something is missing. Nothing here exits the shell, sets its options, or
# exports a variable that would change a single python started later.

# _wordrun_root prints where the repository is: the folder above this file's, wherever the shell goes from here.
# zsh has no BASH_SOURCE, and bash could not read zsh's form of it.
if [ -n "${ZSH_VERSION:-}" ]; then
  eval '_wordrun_root=${${(%):-%x}:A:h:h}'
else
  _wordrun_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
fi
eval "_wordrun_root() { printf '%s\\n' $(printf '%q' "$_wordrun_root"); }"
unset _wordrun_root

_wordrun_say() {
  printf 'setup: %s\n' "$*" >&2
}

# Print what keeps the python "$1" from running wordrun, one line each; nothing if nothing does.
_wordrun_missing() {
  "$1" - 2>/dev/null <<'PYTHON'
import importlib, sys

if not (3, 10) <= sys.version_info[:2] < (3, 14):
    print(f"Python 3.10 to 3.13 is needed, this is {sys.version.split()[0]}")
# mpi4py first: some sites' MPI insists on being loaded before torch.
for name, remedy in (
    ("mpi4py.MPI", "pip install 'wordrun[mpich]'; on a cluster load its MPI module and rebuild mpi4py against it"),
    ("torch", "pip install torch"),
    ("wordrun", "pip install -e '.[mpich]' in the repository"),
):
    try:
        importlib.import_module(name)
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        print(f"{name} cannot be imported: {first} ({remedy})")
PYTHON
}

# Find or make the environment: an active one, else the repository's .venv. Puts its bin first in PATH.
setup_python() {
  local home why python problems line
  if [ -n "${VIRTUAL_ENV:-}" ]; then
    home=$VIRTUAL_ENV why="active virtual environment"
  elif [ -n "${CONDA_PREFIX:-}" ]; then
    home=$CONDA_PREFIX why="active conda environment"
  else
    home=$(_wordrun_root)/.venv why="the repository's own"
    if [ ! -x "$home/bin/python" ] && ! "$(_wordrun_root)/bin/venv" mpich; then
      _wordrun_say "bin/venv could not make $home (see above)"
      return 1
    fi
  fi
  python=$home/bin/python
  if [ ! -x "$python" ]; then
    _wordrun_say "$home ($why) has no bin/python: deactivate it, or remove it and run setup_python again"
    return 1
  fi
  problems=$(_wordrun_missing "$python") || problems="${problems:-$python does not start: $("$python" --version 2>&1 || true)}"
  if [ -n "$problems" ]; then
    _wordrun_say "$python ($why) cannot run wordrun:"
    while IFS= read -r line; do
      _wordrun_say "  $line"
    done <<EOF
$problems
EOF
    return 1
  fi
  case "$PATH:" in
    "$home/bin:"*) ;;
    *) PATH=$home/bin:$PATH && export PATH ;;
  esac
  printf 'python     %s (%s; %s)\n' "$python" "$("$python" --version 2>&1)" "$why"
}

# Print the user, machine, time, and what launch finds: scheduler, hosts, devices, launcher.
setup_job() {
  local launch
  launch=$(command -v launch || true)
  if [ -z "$launch" ]; then
    _wordrun_say "no launch in PATH: run setup_python first"
    return 1
  fi
  printf '%-15s %s\n' user "$(id -un)" machine "$(uname -sm)" host "$(uname -n)" time "$(date '+%Y-%m-%d %H:%M:%S %Z')"
  if ! "$launch" --info; then
    _wordrun_say "launch --info failed (see above)"
    return 1
  fi
}
