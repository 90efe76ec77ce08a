#!/usr/bin/env bash
# build.sh OUTDIR [--asan] [--cuda 12|13]: builds the stub libraries, to be found by LD_LIBRARY_PATH=OUTDIR.
# --asan: the libraries themselves under AddressSanitizer (kernels: FAKE_CUDA_ASAN=1); --cuda 12: libnvrtc.so.12 and libcublasLt.so.12.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUTDIR [--asan] [--cuda 12|13]}
shift
major=13
flags=()
while [ $# -gt 0 ]; do
  case $1 in
    --asan) flags+=(-fsanitize=address -fno-omit-frame-pointer) ;;
    --cuda) major=${2:?a major version}; shift ;;
    *) echo "build.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out/include"
out=$(cd "$out" && pwd)
cp "$here"/include/*.h "$out/include/"

# A library is written beside its place and renamed, so that a running test never sees half of one.
library() { # SONAME OPTIMISATION SOURCE...
  local name=$1 level=$2
  shift 2
  # shellcheck disable=SC2086 # several options
  g++ -std=c++17 $level -march=native -ffp-contract=off -fPIC -shared -fvisibility=hidden -Wall -Wextra -DFAKE_CUDA_MAJOR="$major" \
    "${flags[@]}" -I"$here" -Wl,-soname,"$name" -Wl,-z,nodelete -Wl,-rpath,'$ORIGIN' -o "$out/.$name.$$" "$@" -ldl -lpthread
  mv "$out/.$name.$$" "$out/$name"
}
cd "$here"
pids=()
library libcuda.so.1 '-O2 -ftls-model=initial-exec' driver/*.cpp
library "libnvrtc.so.$major" -O1 nvrtc.cpp & pids+=($!)
# The libraries above the driver share the streams of the libcuda beside them.
library "libcublasLt.so.$major" -O3 cublaslt.cpp "$out/libcuda.so.1" & pids+=($!)
if [ -f cudnn.cpp ]; then library libcudnn.so.9 -O3 cudnn.cpp "$out/libcuda.so.1" & pids+=($!); fi
if [ -f nccl.cpp ]; then library libnccl.so.2 -O2 nccl.cpp "$out/libcuda.so.1" & pids+=($!); fi
for pid in "${pids[@]}"; do wait "$pid"; done
