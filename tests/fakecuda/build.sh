#!/usr/bin/env bash
# build.sh OUTDIR [--asan] [--cuda 12|13]: builds the stub libraries, to be found by LD_LIBRARY_PATH=OUTDIR.
# --asan: the libraries themselves under AddressSanitizer (kernels: FAKE_CUDA_ASAN=1); --cuda 12: libnvrtc.so.12 and libcublasLt.so.12.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=${1:?usage: build.sh OUTDIR [--asan] [--cuda 12|13]}
shift
major=13
flags="-std=c++17 -march=native -ffp-contract=off -fPIC -fvisibility=hidden -Wall -Wextra"
sanitize=
while [ $# -gt 0 ]; do
  case $1 in
    --asan) sanitize="-fsanitize=address -fno-omit-frame-pointer" ;;
    --cuda) major=${2:?a major version}; shift ;;
    *) echo "build.sh: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
mkdir -p "$out/include"
out=$(cd "$out" && pwd)
cp "$here"/include/*.h "$out/include/"
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
cd "$here"

# Only what computes is optimised with effort. All at once, the slowest first.
xargs -P "$(nproc)" -L 1 g++ $flags $sanitize -DFAKE_CUDA_MAJOR="$major" -I. -c << END
-O0 nvrtc.cpp -o $objects/nvrtc.o
-O3 nccl/operations.cpp -o $objects/nccl-operations.o
-O1 nccl/api.cpp -o $objects/nccl-api.o
-O1 nccl/comm.cpp -o $objects/nccl-comm.o
-O3 cudnn.cpp -o $objects/cudnn.o
-O1 driver/stream.cpp -o $objects/driver-stream.o
-O1 driver/memory.cpp -o $objects/driver-memory.o
-O2 -ftls-model=initial-exec driver/block.cpp -o $objects/driver-block.o
-O1 driver/device.cpp -o $objects/driver-device.o
-O1 driver/module.cpp -o $objects/driver-module.o
-O1 driver/trace.cpp -o $objects/driver-trace.o
-O3 cublaslt.cpp -o $objects/cublaslt.o
END

# Linked beside its place and renamed, so that a running test never sees half of one. Never unloaded: threads and exit handlers stay.
library() { # SONAME OBJECTS...
  local name=$1
  shift
  g++ -shared $sanitize -Wl,-soname,"$name" -Wl,-z,nodelete -Wl,-rpath,'$ORIGIN' -o "$out/.$name.$$" "$@" -ldl -lpthread
  mv "$out/.$name.$$" "$out/$name"
}
library libcuda.so.1 "$objects"/driver-*.o
library "libnvrtc.so.$major" "$objects/nvrtc.o"
# The libraries above the driver share the streams of the libcuda beside them.
library "libcublasLt.so.$major" "$objects/cublaslt.o" "$out/libcuda.so.1"
library libcudnn.so.9 "$objects/cudnn.o" "$out/libcuda.so.1"
library libnccl.so.2 "$objects"/nccl-*.o "$out/libcuda.so.1"
