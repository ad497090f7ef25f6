# shellcheck shell=bash
# Shell helpers, to be sourced in bash or zsh:
#
#   source bin/setup.sh && setup_python && setup_job                    in the repository
#   source "$(wordrun --setup-sh)" && setup_python && setup_job         with an installed wordrun
#
# setup_python   loads the site's modules, finds or (in the repository) creates the Python environment, or uses the one
#                given as argument, checks it, and puts it first in PATH
# setup_job      prints the user, the machine, the time, and what launch detects (with its options, if any are given)
#
# Each returns non-zero, with the reason, if something is missing. Neither exits the shell, changes its options, or exports
# a variable that would affect a python started later.

# _wordrun_root prints the path of the repository, which has a link to this file in bin/, or of the installed package, even
# after a change of directory. zsh has no BASH_SOURCE, and bash cannot parse zsh's equivalent.
if [ -n "${ZSH_VERSION:-}" ]; then
  eval '_wordrun_root=${${(%):-%x}:a:h:h:A}'
elif [ -z "${BASH_VERSION:-}" ]; then
  echo 'setup: this shell is neither bash nor zsh' >&2
  return 1
else
  _wordrun_root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
fi
eval "_wordrun_root() { printf '%s\\n' $(printf '%q' "$_wordrun_root"); }"
unset _wordrun_root

_wordrun_say() {
  printf 'setup: %s\n' "$*" >&2
}

# Print the reasons why the python "$1" cannot run wordrun, one per line; print nothing if it can.
_wordrun_missing() {
  "$1" - 2>/dev/null <<'PYTHON'
import importlib, sys

try:
    import mpi4py

    mpi4py.rc.initialize = False  # some MPIs cannot be initialized on a login node
except ImportError:
    pass
if not (3, 10) <= sys.version_info[:2] < (3, 14):
    print(f"Python 3.10 to 3.13 is required, this is {sys.version.split()[0]}")
# mpi4py first: at some sites MPI must be loaded before torch.
for name, remedy in (
    ("mpi4py.MPI", "pip install 'wordrun[mpich]'; on a cluster, load its MPI module and rebuild mpi4py against it"),
    ("torch", "pip install torch"),
    ("wordrun", "pip install wordrun, or pip install -e . in the repository"),
):
    try:
        importlib.import_module(name)
    except Exception as error:
        first = (str(error).strip() or repr(error)).splitlines()[0]
        print(f"{name} cannot be imported: {first} ({remedy})")
PYTHON
}

# Print the path of this site's file: the user's own sites first, then wordrun's. There may be no Python yet, so the files are
# read line by line: "  hosts: REGEX", "  env: {NAME: REGEX, ...}".
_wordrun_site() {
  local file hosts pair name pattern
  while IFS= read -r file; do
    hosts=$(sed -n 's/ *#.*//; s/^  hosts: *//p' "$file" | tr -d "'\"")
    if [ -n "$hosts" ] && uname -n | sed 'p; s/[.].*//' | grep -qxP -- "$hosts"; then
      printf '%s\n' "$file" && return 0
    fi
    while IFS= read -r pair; do
      name=${pair%%:*} pattern=${pair#*: }
      if [ -n "$pair" ] && printenv "$name" | grep -qP -- "$pattern"; then
        printf '%s\n' "$file" && return 0
      fi
    done <<EOF
$(sed -n 's/^  env: *{\(.*\)}.*/\1/p' "$file" | sed 's/, \([A-Z]\)/\n\1/g' | tr -d "'\"")
EOF
  done <<EOF
$(for folder in "${XDG_CONFIG_HOME:-$HOME/.config}/wordrun/sites" "$(_wordrun_root)"/{src/wordrun/,}launch/sites; do
    find "$folder" -name '*.yaml' 2>/dev/null | sort
  done)
EOF
  return 1
}

# Run the module lines of the site file "$1", if it has any: 'modules: [LINE, LINE]', or a '- LINE' list below it.
# Their exit status is unreliable, so their effect is checked afterwards.
_wordrun_modules() {
  local line lines
  grep -q '^modules:' "$1" || return 0
  lines=$(sed -n 's/[[:space:]]#.*//; /^modules:[[:space:]]*$/,/^[^ #-]/s/^ *- *//p; s/^modules: *\[\(.*\)\] *$/[\1/p' "$1" |
    sed '/^\[/{s/^\[ *//; s/ *, */\n/g;}' | sed "s/ *\$//; s/^\"\\(.*\\)\"\$/\\1/; s/^'\\(.*\\)'\$/\\1/")
  if [ -z "$lines" ] && grep -q '^modules: *\[ *\]' "$1"; then
    return 0
  elif [ -z "$lines" ]; then
    _wordrun_say "$1: cannot read its modules without Python: write 'modules: [LINE, LINE]' on one line, or '- LINE' each below it"
    return 1
  fi
  if ! command -v module >/dev/null; then
    _wordrun_say "$1 has modules to load, but this shell has no 'module': start a login shell (bash -l)"
    return 1
  fi
  while IFS= read -r line; do
    printf 'module     %s\n' "$line"
    eval "$line" || _wordrun_say "'$line' returned $?"
  done <<EOF
$lines
EOF
}

# Check that the modules loaded on site "$1" can support an environment; otherwise say what to load.
_wordrun_loaded() {
  "${PYTHON:-python3}" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' 2>/dev/null && return 0
  if command -v mpicc >/dev/null || [ -n "${CRAYPE_VERSION:-}" ]; then return 0; fi
  _wordrun_say "$1: neither a Python with torch nor an MPI (mpicc) is loaded, and PyPI's MPI cannot start ranks here:"
  _wordrun_say "  load modules that provide them (see 'module avail' and the site's page on PyTorch), and run setup_python again"
  _wordrun_say "  to load them every time, put 'modules: [module load NAME, ...]' into a copy of $1.yaml in"
  _wordrun_say "  ${XDG_CONFIG_HOME:-$HOME/.config}/wordrun/sites (original: $(_wordrun_root)/src/wordrun/launch/sites)"
  return 1
}

# Find or create the environment: the path in "$1", else the active one, else, if wordrun is installed, the one that it is
# installed in, else .venv-SITE on top of the loaded modules on a known site, else the repository's .venv. Put its bin
# directory first in PATH.
setup_python() {
  local home why python problems line site name
  site=$(_wordrun_site) || site=
  if [ -n "${1:-}" ]; then
    home=$1 why="given as argument"
  elif [ -n "${VIRTUAL_ENV:-}" ]; then
    home=$VIRTUAL_ENV why="active virtual environment"
  elif [ ! -e "$(_wordrun_root)/bin/venv" ]; then
    [ -z "$site" ] || [ -n "${CONDA_PREFIX:-}" ] || _wordrun_modules "$site" || return 1
    home=$(cd -- "$(_wordrun_root)/../../../.." && pwd -P) why="wordrun is installed there" # ENV/lib/python3.N/site-packages
  elif [ -n "$site" ]; then
    # An active conda environment replaces the modules.
    [ -n "${CONDA_PREFIX:-}" ] || _wordrun_modules "$site" || return 1
    name=$(basename "$site" .yaml)
    why="on top of what is loaded on $name"
    home=$(_wordrun_root)/.venv-$name
    if [ ! -x "$home/bin/python" ] && ! _wordrun_loaded "$name"; then
      return 1
    elif [ ! -x "$home/bin/python" ] && ! WORDRUN_VENV=$home "$(_wordrun_root)/bin/venv" ''; then
      _wordrun_say "bin/venv could not create $home (see above)"
      return 1
    fi
  elif [ -n "${CONDA_PREFIX:-}" ]; then
    home=$CONDA_PREFIX why="active conda environment"
  else
    home=$(_wordrun_root)/.venv why="the repository's own"
    if [ ! -x "$home/bin/python" ] && ! "$(_wordrun_root)/bin/venv" mpich; then
      _wordrun_say "bin/venv could not create $home (see above)"
      return 1
    fi
  fi
  python=$home/bin/python
  if [ ! -x "$python" ]; then
    _wordrun_say "$home ($why) has no bin/python: deactivate or remove it, or name another: setup_python DIR"
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

# Print the user, machine, time, and what launch detects with the options "$@": scheduler, hosts, devices, launcher.
setup_job() {
  local launch
  launch=$(command -v launch || true)
  if [ -z "$launch" ]; then
    _wordrun_say "no launch in PATH: run setup_python first"
    return 1
  fi
  printf '%-15s %s\n' user "$(id -un)" machine "$(uname -sm)" host "$(uname -n)" time "$(date '+%Y-%m-%d %H:%M:%S %Z')"
  if ! "$launch" --info "$@"; then
    _wordrun_say "launch --info failed (see above)"
    return 1
  fi
}
