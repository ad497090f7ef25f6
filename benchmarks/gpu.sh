#!/usr/bin/env bash
# Everything that a machine with a GPU can show in one short visit, without a network: tests, smoke runs and figures.
#
#   benchmarks/gpu.sh WHEELS OUT [PART...]    parts: tests, smoke, figures; by default all, in this order
#
# WHEELS is a folder with the packages that the machine lacks, or - if it has them all. OUT gets PART.log of each part,
# and summary.txt. A part that fails or runs out of time does not stop the next. In the environment: limits in seconds
# TESTS_S, SMOKE_S and FIGURES_S, more options for pytest (TESTS) and benchmarks/gpu.py (FIGURES), and NANOGPT, a clone.
set -uo pipefail
if [ $# -lt 2 ]; then
    sed -n '4,9s/^# \{0,1\}//p' "$0"
    exit 2
fi
wheels=$1 out=$2
shift 2
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit
[ "$wheels" = - ] || wheels=$(cd "$wheels" && pwd) || exit
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit
python=${PYTHON:-python3}
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT

# A virtual environment over the machine's own: a folder of packages alone would lack mpich's libraries and programs.
"$python" -m venv --system-site-packages --without-pip "$site/venv" || exit
base=$python python=$site/venv/bin/python
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PATH="$site/venv/bin:$PATH" PYTHONDONTWRITEBYTECODE=1
# wordrun and its conf/ side by side, as pip would install them, and the packages of a virtual environment below this one.
mkdir -p "$site/here/wordrun"
ln -s "$PWD"/src/wordrun/* "$PWD/conf" "$site/here/wordrun/"
{ echo "$site/here" && "$base" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; } >"$packages/wordrun.pth"

report() { # NAME STATUS SECONDS
    local how="failed with status $2"
    [ "$2" = 0 ] && how=passed
    [ "$2" = 124 ] && how="ran out of time"
    { echo "== $1 $how after $3 s" && tail -n "${4:-8}" "$out/$1.log" | cut -c -200; } | tee -a "$out/summary.txt"
}

part() { # NAME LIMIT COMMAND...
    local name=$1 limit=$2 start=$SECONDS
    shift 2
    # pytest still reports after an interrupt.
    timeout --signal=INT --kill-after=15 "$limit" "$@" >"$out/$name.log" 2>&1
    report "$name" $? $((SECONDS - start))
}

smoke() {
    for words in "" "model=llama_debug train.dtype=bf16" "train.compile=true" "tokenizer=byte data.mask_documents=true train.dtype=fp16"; do
        echo "== wordrun data=sample train=smoke $words"
        # shellcheck disable=SC2086
        "$python" -m wordrun data=sample train=smoke tracker=jsonl $words || failed=1
    done
    echo "== wordrun generate" && "$python" -m wordrun generate prompt=The length=50 || failed=1
    for words in "--info" "--doctor" "$python -m wordrun.test_dist"; do
        echo "== launch $words"
        # shellcheck disable=SC2086
        "$python" -m wordrun.launch $words || failed=1
    done
    return "${failed:-0}"
}

{
    nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader
    [ "$wheels" = - ] ||
        "$base" -m pip --python "$python" install -q --no-index --no-deps --no-compile "$wheels"/*.whl
    "$python" -c 'import sys, torch; print("python", sys.version.split()[0], "torch", torch.__version__)'
    "$python" -c 'import wordrun, wordrun.conf, pytest, xdist; print("imports work:", wordrun.__file__)'
    cc --version | head -n 1
    nproc
} >"$out/machine.log" 2>&1
report machine 0 "$SECONDS" 12

for name in "${@:-tests smoke figures}"; do
    for each in $name; do
        case $each in
        tests)
            # shellcheck disable=SC2086
            part tests "${TESTS_S:-330}" "$python" -m pytest tests/gpu -n 6 -v -W default --durations=20 \
                --basetemp "$site/tests" -p no:cacheprovider -p no:benchmark ${TESTS:-}
            ;;
        smoke)
            export -f smoke && export python
            mkdir -p "$site/smoke"
            part smoke "${SMOKE_S:-150}" bash -c "cd '$site/smoke' && smoke"
            ;;
        figures)
            limit=${FIGURES_S:-480}
            # shellcheck disable=SC2086
            part figures "$limit" "$python" benchmarks/gpu.py --budget $((limit - 20)) --out "$out/figures" \
                --nanogpt "${NANOGPT:-nanoGPT}" ${FIGURES:-}
            ;;
        *) echo "no part is called $each: tests, smoke, figures" >&2 ;;
        esac
    done
done
