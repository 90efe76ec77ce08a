#!/usr/bin/env bash
# The GPU lane: what a machine with a GPU can show and others cannot. Under 8 minutes; downloads nothing; says what it skips.
#
#   tests/gpu.sh                                   # on a machine with a GPU and Rust
#   tests/gpu.sh --program DIR/tftrain --tests DIR/gpu   # with a program and a test binary (`cargo test --test gpu --no-run`) built elsewhere
#   tests/gpu.sh --stand-in                        # the whole script on a CUDA made of CPU threads: tries it out, and shows no speed
#
# Prints a table, and leaves lane.json in the folder of --out (target/gpu-lane), with a log for each part.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
stand_in= program= tests= out=$root/target/gpu-lane limit=470
while [ $# -gt 0 ]; do
  case $1 in
    --stand-in) stand_in=1 ;;
    --program) program=$(realpath "${2:?a file}"); shift ;;
    --tests) tests=$(realpath "${2:?a file}"); shift ;;
    --out) out=${2:?a folder}; shift ;;
    --limit) limit=${2:?seconds}; shift ;;
    *) echo "gpu.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
rm -rf "$out"
mkdir -p "$out/logs"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
rows=() failed=0

# note NAME OUTCOME SECONDS REMARK: one row of the table.
note() {
  rows+=("$1|$2|$3|$4")
  printf '%-44s %-8s %5s s  %s\n' "$1" "$2" "$3" "$4"
  [ "$2" != FAILED ] || failed=1
}

# part NAME SECONDS COMMAND...: runs it with a limit; its last line that starts with "= " is the remark.
part() {
  local name=$1 most=$2 log start=$SECONDS code left
  shift 2
  log=$out/logs/$(echo "$name" | tr -c 'a-zA-Z0-9\n' '-').log
  left=$((limit - SECONDS))
  if [ "$left" -lt 5 ]; then
    note "$name" skipped 0 "no time left"
    return
  fi
  timeout -k 5 $((most < left ? most : left)) "$@" > "$log" 2>&1
  code=$?
  local remark
  remark=$(sed -n 's/^= //p' "$log" | tail -n 1)
  case $code in
    0) note "$name" passed $((SECONDS - start)) "$remark" ;;
    77) note "$name" skipped $((SECONDS - start)) "$remark" ;;
    124 | 137) note "$name" FAILED $((SECONDS - start)) "took too long; see $log" ;;
    *) note "$name" FAILED $((SECONDS - start)) "exit $code; see $log"; tail -n 15 "$log" ;;
  esac
}

# What is there.
cargo=$(command -v cargo || true)
if [ -z "$program" ] && [ -n "$cargo" ]; then
  # Time to build is not the lane's.
  cargo build --release --locked --offline 2>&1 | tail -n 2 && program=${CARGO_TARGET_DIR:-$root/target}/release/tftrain
fi
[ -x "$program" ] || { echo "gpu.sh: no program: it needs cargo, or --program FILE" >&2; exit 2; }
if [ -z "$tests" ] && [ -n "$cargo" ]; then
  tests=$(cargo test --test gpu --locked --offline --no-run --message-format=json 2> "$out/logs/build.log" |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p' | tail -n 1)
fi
export TFTRAIN_BIN=$program TFTRAIN_GPU=real
if [ -n "$stand_in" ]; then
  "$root/tests/fakecuda/build.sh" "$work/cuda" || { echo "gpu.sh: the stand-in does not build" >&2; exit 2; }
  export LD_LIBRARY_PATH=$work/cuda FAKE_CUDA_CACHE=$work/kernels XDG_CACHE_HOME=$work/cache
  export FAKE_CUDA_DEVICES=${FAKE_CUDA_DEVICES:-2}
  unset CUDA_VISIBLE_DEVICES
fi
SECONDS=0
card=$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2> /dev/null | head -n 1)
[ -z "$stand_in" ] || card="stand-in on CPU threads"
# batch, steps to train, steps of a benchmark, pictures
if [ -n "$stand_in" ]; then batch=2 train=8 bench=2 examples=64; else batch=128 train=200 bench=100 examples=5000; fi

echo "GPU lane, $(date -u +%Y-%m-%d), ${card:-no card found by nvidia-smi}"
"$program" --version
"$program" devices | tee "$out/logs/devices.log"
gpus=$(grep -c 'GPU:[0-9]* -> device: ' "$out/logs/devices.log")
[ "$gpus" -gt 0 ] || { echo "gpu.sh: no GPU is visible (--stand-in tries the script out)" >&2; exit 2; }
echo

suite() { # suite NAME FILTER: a part of the test suite.
  if [ ! -x "$tests" ]; then
    echo "= no test binary: it needs cargo, or --tests FILE"
    return 77
  fi
  "$tests" "$1" --nocapture --test-threads=1 || return 1
  return 0
}

run_suite() {
  suite "$1" > "$work/suite" 2>&1
  local code=$?
  cat "$work/suite"
  [ "$code" = 0 ] || return $code
  local skips
  skips=$(grep -c '^skipped: ' "$work/suite")
  echo "= $(sed -n 's/^test result: ok. \([0-9]* passed\).*/\1/p' "$work/suite" | head -n 1)$([ "$skips" = 0 ] || echo ", of which $skips skipped: $(grep '^skipped: ' "$work/suite" | sort -u | head -n 1)")"
}

small="--synthetic --summary-every 0 --log-every 1 --set data.examples=$examples --batch-size $batch"

# The loss falls, on every model.
learns() { # learns MODEL FLAGS...
  local model=$1
  shift
  echo "model: $model" > "$work/$model.yaml"
  "$program" train --config "$work/$model.yaml" $small --num-gpus 1 --max-steps $train --train-dir "$work/$model" "$@" || return 1
  local first last
  first=$(sed -n 's/.*"loss":\([0-9.eE+-]*\).*/\1/p' "$work/$model/metrics.jsonl" | head -n 1)
  last=$(sed -n 's/.*"loss":\([0-9.eE+-]*\).*/\1/p' "$work/$model/metrics.jsonl" | tail -n 10 | sort -g | head -n 5 | tail -n 1)
  echo "= loss $first, after $train steps $last"
  awk -v a="$first" -v b="$last" -v all="$train" 'BEGIN { exit !(b < a || all < 50) }'
}

# However gradients meet, the same is learned: last checkpoints by what `inspect` says of them, in the digits that must agree.
reducers() {
  local n=$((gpus < 4 ? gpus : 4)) way
  if [ "$n" -lt 2 ]; then
    echo "= needs 2 GPUs, and there is 1"
    return 77
  fi
  local steps=5 i=0
  for way in "--reduce nccl" "--reduce cpu" "--variables replicated --reduce nccl" "--variables replicated --reduce cpu"; do
    "$program" cifar10 $small --num-gpus "$n" --learning-rate 0.005 --max-steps $steps --train-dir "$work/way$i" $way || return 1
    "$program" inspect checkpoint "$work/way$i" | sed -n 's/^\([a-z0-9_]*\/[a-z]* .*\) mean .* std \([0-9.-]*\) .*/\1 \2/p' > "$work/way$i.txt"
    i=$((i + 1))
  done
  [ -s "$work/way0.txt" ] || return 1
  for i in 1 2 3; do diff "$work/way0.txt" "$work/way$i.txt" || return 1; done
  echo "= 4 ways on $n GPUs"
}

sanitizer() {
  if [ -n "$stand_in" ] || ! command -v compute-sanitizer; then
    echo "= there is no compute-sanitizer"
    return 77
  fi
  local model
  for model in cifar10 resnet; do
    echo "model: $model" > "$work/$model.yaml"
    compute-sanitizer --tool memcheck --error-exitcode 9 --target-processes all \
      "$program" train --config "$work/$model.yaml" $small --batch-size 4 --num-gpus 1 --max-steps 3 --train-dir "$work/memcheck-$model" || return 1
  done
  compute-sanitizer --tool racecheck --error-exitcode 9 \
    "$program" train --config "$work/resnet.yaml" --set model.depth=8 $small --batch-size 2 --num-gpus 1 --max-steps 2 --train-dir "$work/racecheck" || return 1
  echo "= no errors: memcheck of both networks, racecheck of ResNet-8"
}

python=$(command -v "${PYTHON:-python3}" || true)
benchmark() {
  if [ -z "$python" ]; then
    echo "= there is no python3"
    return 77
  fi
  local flags="--batch $batch --steps $bench --limit $remaining"
  # The stand-in runs no PyTorch.
  [ -z "$stand_in" ] || flags="$flags --modes eager --dtypes f32 tf32"
  "$python" benches/peers/gpu.py --tftrain "$program" --json "$out/bench.json" $flags || return 1
  echo "= $(grep -c 'examples/s' "$out/logs/benchmark-beside-PyTorch.log") rows, $(grep -c SKIPPED "$out/logs/benchmark-beside-PyTorch.log") left out: bench.json"
}

# `timeout` runs programs, not functions.
export -f suite run_suite learns reducers sanitizer benchmark
export program tests work out small train batch bench gpus stand_in python
in_shell() { local name=$1 most=$2; shift 2; part "$name" "$most" bash -uo pipefail -c '"$@"' bash "$@"; }

in_shell "operations beside the CPU" 90 run_suite ops::
in_shell "networks beside recorded values" 60 run_suite golden::
in_shell "$train steps of the tutorial network" 60 learns cifar10
in_shell "$train steps of ResNet-20" 60 learns resnet --learning-rate 0.05
in_shell "ways for gradients to meet" 60 reducers
in_shell "compute-sanitizer" 120 sanitizer
remaining=$((limit - SECONDS - 15))
[ "$remaining" -lt 285 ] || remaining=285
export remaining
in_shell "benchmark beside PyTorch" 300 benchmark
cat "$out/logs/benchmark-beside-PyTorch.log" 2> /dev/null

quote() { printf '"%s"' "$(printf '%s' "$1" | tr -d '\000-\037' | sed 's/[\\"]/\\&/g')"; }
{
  printf '{"date": %s, "card": %s, "stand_in": %s, "seconds": %d,\n "parts": [' \
    "$(quote "$(date -u +%Y-%m-%d)")" "$(quote "$card")" "${stand_in:+true}${stand_in:-false}" "$SECONDS" | sed 's/true1/true/'
  comma=
  for row in "${rows[@]}"; do
    IFS='|' read -r name outcome seconds remark <<< "$row"
    printf '%s\n  {"name": %s, "outcome": %s, "seconds": %d, "remark": %s}' \
      "$comma" "$(quote "$name")" "$(quote "$outcome")" "$seconds" "$(quote "$remark")"
    comma=,
  done
  printf '],\n "bench": '
  cat "$out/bench.json" 2> /dev/null || printf null
  printf '}\n'
} > "$out/lane.json"
echo
echo "$SECONDS s; $out/lane.json"
exit $failed
