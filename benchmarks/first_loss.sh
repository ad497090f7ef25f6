#!/usr/bin/env bash
# Print the seconds from git clone to the first loss that bin/quickstart shows, in a new clone and a new environment.
#
#   benchmarks/first_loss.sh [REPOSITORY]    default: this one
set -euo pipefail
repository=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
begin=$SECONDS
passed() { printf '%4d s  %s\n' $((SECONDS - begin)) "$1"; }

cd "$folder"
git clone --quiet "$repository" wordrun
passed "cloned"
wordrun/bin/quickstart train.max_iters=2 2>&1 | while IFS= read -r line; do
    case $line in
    "installing "* | "installed in "*) passed "$line" ;;
    *"loading torch"*) passed "ranks started" ;;
    *" step 1/2  loss "*) passed "${line#*] }" ;;
    esac
done
