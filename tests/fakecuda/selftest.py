#!/usr/bin/env python3
"""Tests of the stub libraries themselves: selftest.py [--asan] [CASE...]

Builds them into a folder of their own, then runs each case in a process of its own, as most of what they do is chosen by the environment.
--asan adds the case that compiles kernels with AddressSanitizer.
"""
import concurrent.futures
import json
import math
import os
import pathlib
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True  # the folder is hashed by who builds it
from cuda import *

HERE = pathlib.Path(__file__).resolve().parent
CASES = {}
NOT_NUMBERS = 0x7FCD7FCD

KERNELS = r"""
extern "C" __global__ void fill(float* out, float value, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = value;
}
extern "C" __global__ void add_one(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] += 1.0f;
}
// Shared memory of both kinds, shuffles, an atomic.
extern "C" __global__ void __launch_bounds__(256) total(const float* __restrict__ x, float* out, int n) {
  extern __shared__ float part[];
  __shared__ float unused[32];
  float s = 0;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) s += x[i];
  for (int o = 16; o; o >>= 1) s += __shfl_down_sync(0xffffffffu, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < blockDim.x / 32; w++) s += part[w];
    atomicAdd(out, s);
  }
}
// lane, ballot of odd lanes, count over the block, rotated lane, value of a lane that is not there, quarters
extern "C" __global__ void warps(int* out) {
  int t = threadIdx.x + blockDim.x * threadIdx.y, lane = t % 32;
  int* o = out + 6 * t;
  o[0] = lane;
  o[1] = __ballot_sync(~0u, lane & 1);
  o[2] = __syncthreads_count(t % 3 == 0);
  o[3] = __shfl_sync(~0u, lane, lane + 1);
  o[4] = __shfl_xor_sync(~0u, lane, 16);
  o[5] = __shfl_down_sync(~0u, lane, 4, 8);
  if (lane < 8) {
    __syncwarp(0xff);
    o[3] += 100 * __all_sync(0xff, 1);
  }
}
extern "C" __global__ void uninitialised(float* out) {
  __shared__ float s[64];
  if (threadIdx.x > 1000) s[0] = 1.0f;
  out[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void divergent(float* out) {
  if (threadIdx.x % 2) __syncthreads();
  else __shfl_sync(~0u, 1, 0);
}
extern "C" __global__ void past_the_end(float* out, int n) {
  if (threadIdx.x == 0) out[n] = 1.0f;
}
extern "C" __global__ void dynamic_past_the_end(float* out) {
  extern __shared__ float s[];
  s[threadIdx.x] = 1.0f;
}
extern "C" __global__ void vectors(const float4* x, float4* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void last_block_wins(float* out) { out[0] = float(blockIdx.x * blockDim.x + threadIdx.x); }
template <class T> __global__ void never(T* x) {}
#ifdef LATER
extern "C" __global__ void later(int* out) { *out = LATER; }
#endif
"""


def case(**environment):
    def add(function):
        CASES[function.__name__] = (function, environment)
        return function
    return add


def module(*options):
    return load(compile_kernels(KERNELS, "--gpu-architecture=sm_90", *options))


# ---- devices

@case(FAKE_CUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="2,0,7,1")
def visible_devices():
    start()
    count = c.c_int()
    call("cuDeviceGetCount", c.byref(count))
    assert count.value == 2
    name = c.create_string_buffer(64)
    call("cuDeviceGetName", name, 64, 0)
    assert name.value.endswith(b"device 2")
    fails(101, "cuDeviceGet", c.byref(count), 2)


@case(FAKE_CUDA_DEVICES="0")
def no_device():
    fails(100, "cuInit", 0)


@case(FAKE_CUDA_DRIVER_VERSION="12040")
def old_driver():
    start()
    fails(222, "cuModuleLoadData", c.byref(p()), compile_kernels(KERNELS))
    assert library("libcublasLt.so.13").cublasLtCreate(c.byref(p())) == 1
    assert library("libcudnn.so.9").cudnnCreate(c.byref(p())) == 1001


# ---- kernels

@case()
def reductions():
    start()
    s, f = stream(), function(module(), "total")
    n = 100_000
    x, out = upload([float(i % 7) for i in range(n)]), upload([0.0])
    launch(f, 8, 256, s, x, out, c.c_int(n), shared=32)
    synchronize(s)
    assert download(out, 1) == [sum(i % 7 for i in range(n))]


@case()
def warp_operations():
    start()
    s, f = stream(), function(module(), "warps")
    out = alloc(6 * 80, c.c_int)
    launch(f, 1, (16, 5), s, out)
    synchronize(s)
    rows = download(out, 6 * 80, c.c_int)
    for t in range(80):
        lane, ballot, count, rotated, crossed, down = rows[6 * t:6 * t + 6]
        full = t < 64
        lanes = 32 if full else 16
        assert lane == t % 32 and count == 27
        assert ballot & 0xffffffff == (0xaaaaaaaa if full else 0xaaaa)
        wanted = (lane + 1) % 32 if (lane + 1) % 32 < lanes else NOT_NUMBERS
        assert rotated == wanted + (100 if lane < 8 else 0), (t, rotated)
        assert crossed == (lane ^ 16 if full else NOT_NUMBERS), (t, crossed)
        assert down == (lane + 4 if lane % 8 < 4 else lane)


@case()
def fresh_memory_is_not_a_number():
    start()
    s, m = stream(), module()
    out = alloc(64)
    assert all(map(math.isnan, download(out, 64)))
    launch(function(m, "fill"), 1, 64, s, out, c.c_float(1), c.c_int(64))
    launch(function(m, "uninitialised"), 1, 64, s, out)
    synchronize(s)
    assert all(map(math.isnan, download(out, 64)))
    assert all(map(math.isnan, pinned(64)))


@case()
def compile_errors():
    start()
    try:
        compile_kernels('extern "C" __global__ void f(float* x) { x[0] = oops; }', name="broken.cu")
        assert False
    except RuntimeError as error:
        assert error.args[0] == 6 and "broken.cu:1:" in error.args[1] and "oops" in error.args[1], error
    for options, needle in [(["--gpu-architecture=sm_70"], "--gpu-architecture"), (["--no-such-thing"], "--no-such-thing")]:
        try:
            compile_kernels(KERNELS, *options)
            assert False
        except RuntimeError as error:
            assert error.args[0] == 5 and needle in error.args[1], error
    m = module("-DLATER=42")
    out, s = alloc(1, c.c_int), stream()
    launch(function(m, "later"), 1, 1, s, out)
    synchronize(s)
    assert download(out, 1, c.c_int) == [42]
    fails(500, "cuModuleGetFunction", c.byref(p()), module(), b"later")
    fails(500, "cuModuleGetFunction", c.byref(p()), m, b"never")
    image = compile_kernels(KERNELS)
    fails(200, "cuModuleLoadData", c.byref(p()), image.value[:1000])
    fails(209, "cuModuleLoadData", c.byref(p()), compile_kernels(KERNELS, "-arch=sm_120"))


@case()
def launch_limits():
    start()
    m, s = module(), stream()
    f, x = function(m, "fill"), alloc(1)
    arguments = pack([x, c.c_float(0), c.c_int(1)])

    def refused(grid, block, shared=0, f=f):
        fails(1, "cuLaunchKernel", f, *grid, *block, shared, s, arguments, None)

    refused((0, 1, 1), (1, 1, 1))
    refused((1, 70000, 1), (1, 1, 1))
    refused((1, 1, 1), (1025, 1, 1))
    refused((1, 1, 1), (32, 33, 1))
    refused((1, 1, 1), (1, 1, 65))
    refused((1, 1, 1), (1, 1, 1), 50_000)
    refused((1, 1, 1), (512, 1, 1), f=function(m, "total"))  # beyond __launch_bounds__
    call("cuFuncSetAttribute", f, 8, 60_000)
    call("cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 50_000, s, arguments, None)
    synchronize(s)


@case()
def misaligned():
    start()
    s, f = stream(), function(module(), "vectors")
    x = alloc(64)
    launch(f, 1, 4, s, c.c_uint64(x.value + 4), x)
    fails(716, "cuStreamSynchronize", s)


@case()
def divergent_barriers():
    start()
    s = stream()
    launch(function(module(), "divergent"), 1, 32, s, alloc(1))
    synchronize(s)


@case(FAKE_CUDA_ORDER="reverse")
def reverse_order():
    start()
    s, m = stream(), module()
    out = alloc(1)
    launch(function(m, "last_block_wins"), 4, 32, s, out)
    synchronize(s)
    assert download(out, 1) == [0.0]
    x, out = upload([1.0] * 1000), upload([0.0])
    launch(function(m, "total"), 4, 256, s, x, out, c.c_int(1000), shared=32)
    synchronize(s)
    assert download(out, 1) == [1000.0]


# ---- memory

@case(FAKE_CUDA_MEMORY="1000000")
def out_of_memory():
    start()
    free, total = size(), size()
    call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
    assert (free.value, total.value) == (1_000_000, 1_000_000)
    x = alloc(200_000)
    fails(2, "cuMemAlloc_v2", c.byref(c.c_uint64()), size(300_000))
    call("cuMemGetInfo_v2", c.byref(free), c.byref(total))
    assert free.value == 1_000_000 - 800_256
    s, y = stream(), c.c_uint64()
    call("cuMemFreeAsync", x, s)
    call("cuMemAllocAsync", c.byref(y), size(800_000), s)  # waits for the free
    call("cuMemFree_v2", y)
    fails(1, "cuMemFree_v2", y)


@case(FAKE_CUDA_LEAKS="1", FAKE_CUDA_TRACE="trace.json")
def counters_and_leaks():
    start()
    s, m = stream(), module()
    x = alloc(10)
    for _ in range(3):
        launch(function(m, "fill"), 1, 32, s, x, c.c_float(0), c.c_int(10))
    host = pinned(10)
    call("cuMemcpyDtoHAsync_v2", host, x, size(40), s)
    synchronize(s)
    download(x, 10)


def check_counters_and_leaks(done, folder):
    assert "40 bytes were never freed" in done.stderr, done.stderr
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["launch"] == 3 and trace["kernels"] == {"fill": 3} and trace["leaked_bytes"] == 40, trace
    assert trace["copies_d2h"] == 2 and trace["pageable_copies"] == 1 and trace["hostalloc"] == 1, trace


@case()
def guard_zones():
    start()
    s, x = stream(), alloc(10)
    launch(function(module(), "past_the_end"), 1, 32, s, x, c.c_int(10))
    synchronize(s)


@case()
def far_beyond_the_end():
    start()
    s, x = stream(), alloc(10)
    launch(function(module(), "past_the_end"), 1, 32, s, x, c.c_int(100_000_000))
    synchronize(s)


@case()
def stale_and_foreign_pointers():
    first = start(0)
    x = alloc(8)
    call("cuMemFree_v2", x)
    fails(1, "cuMemcpyHtoD_v2", x, (c.c_float * 8)(), size(32))
    fails(1, "cuMemcpyHtoD_v2", alloc(8), (c.c_float * 9)(), size(36))
    foreign = alloc(8)
    start(1)
    s, f = stream(), function(module(), "fill")
    call("cuCtxEnablePeerAccess", first, 0)
    launch(f, 1, 8, s, foreign, c.c_float(0), c.c_int(8))
    synchronize(s)
    call("cuCtxDisablePeerAccess", first)
    launch(f, 1, 8, s, foreign, c.c_float(0), c.c_int(8))
    fails(700, "cuStreamSynchronize", s)
    fails(700, "cuMemAlloc_v2", c.byref(c.c_uint64()), size(4))


@case()
def pageable_memory_in_a_kernel():
    start()
    s, f = stream(), function(module(), "fill")
    pageable = (c.c_float * 8)()
    launch(f, 1, 8, s, c.c_uint64(c.addressof(pinned(8))), c.c_float(0), c.c_int(8))
    synchronize(s)
    launch(f, 1, 8, s, c.c_uint64(c.addressof(pageable)), c.c_float(0), c.c_int(8))
    fails(700, "cuStreamSynchronize", s)


# ---- streams

@case(FAKE_CUDA_DELAY_US="20000")
def streams_are_asynchronous():
    start()
    f = function(module(), "add_one")
    a, b, x = stream(), stream(), upload([0.0])
    began = time.time()
    launch(f, 1, 1, a, x, c.c_int(1))
    assert time.time() - began < 0.01
    host = pinned(1)
    host[0] = 7.0
    call("cuMemcpyDtoHAsync_v2", host, x, size(4), b)  # a race: nothing orders it behind the kernel
    assert host[0] == 7.0 or math.isnan(host[0])
    synchronize(b)
    missed = host[0]
    synchronize(a)
    # With an event the copy sees the kernel, every time.
    e = event()
    for i in range(5):
        launch(f, 1, 1, a, x, c.c_int(1))
        call("cuEventRecord", e, a)
        call("cuStreamWaitEvent", b, e, 0)
        call("cuMemcpyDtoHAsync_v2", host, x, size(4), b)
        synchronize(b)
        assert host[0] == i + 2.0
    assert missed in (0.0, 1.0)


@case(FAKE_CUDA_DELAY_US="2000")
def a_missing_wait_shows():
    start()
    f = function(module(), "add_one")
    a, b, x, host = stream(), stream(), upload([0.0]), pinned(1)
    wrong = 0
    for i in range(20):
        for _ in range(3):
            launch(f, 1, 1, a, x, c.c_int(1))
        call("cuMemcpyDtoHAsync_v2", host, x, size(4), b)
        synchronize(b)
        wrong += host[0] != 3.0 * (i + 1)
        synchronize(a)
    assert wrong, "the race was never seen"


@case()
def events():
    start()
    s, a, b = stream(), event(), event()
    fails(400, "cuEventElapsedTime_v2", c.byref(c.c_float()), a, b)
    call("cuEventRecord", a, s)
    sleep = c.CFUNCTYPE(None, p)(lambda _: time.sleep(0.05))
    call("cuLaunchHostFunc", s, sleep, None)
    call("cuEventRecord", b, s)
    assert driver.cuEventQuery(b) == 600 and driver.cuStreamQuery(s) == 600
    call("cuEventSynchronize", b)
    ms = c.c_float()
    call("cuEventElapsedTime_v2", c.byref(ms), a, b)
    assert 45 < ms.value < 5000
    start(1)
    fails(400, "cuEventRecord", a, stream())


# ---- graphs

@case(FAKE_CUDA_TRACE="trace.json")
def graphs():
    start()
    m, a, b = module(), stream(), stream()
    x, y = upload([0.0] * 64), upload([0.0])
    fork, join = event(2), event(2)
    call("cuStreamBeginCapture_v2", a, 1)
    launch(function(m, "add_one"), 1, 64, a, x, c.c_int(64))
    call("cuEventRecord", fork, a)
    call("cuStreamWaitEvent", b, fork, 0)
    launch(function(m, "total"), 1, 32, b, x, y, c.c_int(64), shared=32)
    call("cuEventRecord", join, b)
    call("cuStreamWaitEvent", a, join, 0)
    launch(function(m, "add_one"), 1, 64, a, x, c.c_int(64))
    graph, instance = p(), p()
    call("cuStreamEndCapture", a, c.byref(graph))
    assert download(x, 1) == [0.0], "nothing runs during a capture"
    call("cuGraphInstantiateWithFlags", c.byref(instance), graph, c.c_ulonglong(0))
    call("cuGraphDestroy", graph)
    for _ in range(3):
        call("cuGraphLaunch", instance, a)
    synchronize(a)
    assert download(x, 64) == [6.0] * 64 and download(y, 1) == [64.0 * (1 + 3 + 5)]
    call("cuGraphExecDestroy", instance)


def check_graphs(done, folder):
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["graph"] == 3 and trace["graph_kernels"] == 9 and trace["launch"] == 3, trace


@case()
def capture_rules():
    start()
    m, a, b = module(), stream(), stream()
    x, outside, inside = upload([0.0]), event(2), event(2)
    call("cuEventRecord", outside, b)
    graph = p()

    def broken(code, name, *arguments, mode=1):
        call("cuStreamBeginCapture_v2", a, mode)
        call("cuEventRecord", inside, a)
        fails(code, name, *arguments)
        status = c.c_int()
        call("cuStreamIsCapturing", a, c.byref(status))
        assert status.value == 2
        fails(901, "cuLaunchKernel", function(m, "add_one"), 1, 1, 1, 1, 1, 1, 0, a, pack([x, c.c_int(1)]), None)
        fails(901, "cuStreamEndCapture", a, c.byref(graph))
        assert not graph.value

    broken(900, "cuMemAlloc_v2", c.byref(c.c_uint64()), size(4))
    broken(900, "cuMemAllocAsync", c.byref(c.c_uint64()), size(4), a)
    broken(900, "cuMemHostAlloc", c.byref(p()), size(4), 0)
    broken(900, "cuStreamSynchronize", a)
    broken(900, "cuStreamSynchronize", b, mode=0)
    broken(900, "cuCtxSynchronize")
    broken(900, "cuEventQuery", outside, mode=0)
    broken(905, "cuStreamWaitEvent", a, outside, 0)
    broken(907, "cuEventSynchronize", inside)
    fails(401, "cuStreamEndCapture", a, c.byref(graph))
    # A branch that does not come back.
    call("cuStreamBeginCapture_v2", a, 2)
    call("cuEventRecord", inside, a)
    call("cuStreamWaitEvent", b, inside, 0)
    launch(function(m, "add_one"), 1, 1, b, x, c.c_int(1))
    fails(904, "cuStreamEndCapture", a, c.byref(graph))
    # Relaxed captures let others work.
    call("cuStreamBeginCapture_v2", a, 2)
    alloc(1)
    synchronize(b)
    call("cuStreamEndCapture", a, c.byref(graph))


# ---- errors on demand

@case(FAKE_CUDA_FAIL="launch:3:CUDA_ERROR_ILLEGAL_ADDRESS,alloc:5:CUDA_ERROR_OUT_OF_MEMORY")
def faults():
    start()
    s, f = stream(), function(module(), "add_one")
    x = upload([0.0])
    for _ in range(3):
        launch(f, 1, 1, s, x, c.c_int(1))
    fails(700, "cuStreamSynchronize", s)
    fails(700, "cuLaunchKernel", f, 1, 1, 1, 1, 1, 1, 0, s, pack([x, c.c_int(1)]), None)
    start(1)
    alloc(1), alloc(1), alloc(1)
    fails(2, "cuMemAlloc_v2", c.byref(c.c_uint64()), size(4))
    alloc(1)


@case(FAKE_CUDA_FAIL="sync:2:CUDA_ERROR_ECC_UNCORRECTABLE@1,compile:1:6")
def faults_of_one_device():
    start(0)
    for _ in range(3):
        synchronize(stream())
    start(1)
    synchronize(stream())
    fails(214, "cuStreamSynchronize", stream())
    try:
        compile_kernels(KERNELS)
        assert False
    except RuntimeError as error:
        assert error.args[0] == 6
    compile_kernels(KERNELS)


# ---- cuBLASLt and cuDNN

def to_float(bits, count, kind):
    import struct
    return [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in download(bits, count, c.c_uint16)] if kind == 14 else download(bits, count)


def from_float(values, kind):
    import struct
    if kind == 14:
        return upload([struct.unpack("<I", struct.pack("<f", v))[0] >> 16 for v in values], c.c_uint16)
    return upload(values)


def matmul(m, n, k, kind=0, compute=68, transpose=(0, 0), epilogue=1, bias=None, aux=None, a=None, b=None, beta=0.0, out=None):
    lt = library("libcublasLt.so.13")
    handle, description, layouts = p(), p(), [p() for _ in range(3)]
    call("cublasLtCreate", c.byref(handle), of=lt)
    call("cublasLtMatmulDescCreate", c.byref(description), compute, 0, of=lt)

    def set_attribute(attribute, value):
        call("cublasLtMatmulDescSetAttribute", description, attribute, c.byref(value), size(c.sizeof(value)), of=lt)

    set_attribute(3, c.c_int(transpose[0]))
    set_attribute(4, c.c_int(transpose[1]))
    set_attribute(7, c.c_int(epilogue))
    if bias is not None:
        set_attribute(8, bias)
    if aux is not None:
        set_attribute(11, aux[0])
        set_attribute(12, c.c_int64(aux[1]))
    shapes = [(k, m) if transpose[0] else (m, k), (n, k) if transpose[1] else (k, n), (m, n)]
    for layout, (rows, columns) in zip(layouts, shapes):
        call("cublasLtMatrixLayoutCreate", c.byref(layout), kind, c.c_uint64(rows), c.c_uint64(columns), c.c_int64(rows), of=lt)
    s = stream()
    out = out or alloc(m * n, c.c_uint16 if kind == 14 else c.c_float)
    la, lb, ld = layouts
    preference, found, heuristic = p(), c.c_int(), (c.c_uint64 * 12)()
    call("cublasLtMatmulPreferenceCreate", c.byref(preference), of=lt)
    code = lt.cublasLtMatmulAlgoGetHeuristic(handle, description, la, lb, ld, ld, preference, 1, heuristic, c.byref(found))
    if code:
        return code
    call("cublasLtMatmul", handle, description, c.byref(c.c_float(1)), a, la, b, lb, c.byref(c.c_float(beta)), out, ld, out, ld, heuristic, None, size(0), s, of=lt)
    synchronize(s)
    return out


@case()
def matrix_products():
    start()
    m, n, k = 37, 6, 9
    a, b, bias = [float(i % 5 - 2) for i in range(m * k)], [float(i % 3 - 1) for i in range(k * n)], [float(i % 4) for i in range(m)]
    plain = [[sum(a[i + x * m] * b[x + j * k] for x in range(k)) for i in range(m)] for j in range(n)]
    for kind in (0, 14):
        da, db, dbias = (from_float(v, kind) for v in (a, b, bias))
        got = to_float(matmul(m, n, k, kind, a=da, b=db), m * n, kind)
        assert got == [v for column in plain for v in column]
        mask = alloc(128 * n // 8, c.c_uint8)
        got = to_float(matmul(m, n, k, kind, epilogue=134, bias=dbias, aux=(mask, 128), a=da, b=db), m * n, kind)
        assert got == [max(v + bias[i], 0.0) for column in plain for i, v in enumerate(column)]
        # The gradient through it: masked, and summed for the bias.
        gradient = from_float([0.0] * m, kind)
        got = to_float(matmul(m, n, k, kind, epilogue=152, bias=gradient, aux=(mask, 128), a=da, b=db), m * n, kind)
        masked = [[v if v + bias[i] > 0 else 0.0 for i, v in enumerate(column)] for column in plain]
        assert got == [v for column in masked for v in column]
        assert to_float(gradient, m, kind) == [sum(column[i] for column in masked) for i in range(m)]
    transposed = [a[i + x * m] for i in range(m) for x in range(k)]
    got = download(matmul(m, n, k, transpose=(1, 0), a=upload(transposed), b=upload(b)), m * n)
    assert got == [v for column in plain for v in column]
    sums = upload([0.0] * n)
    matmul(m, n, k, epilogue=512, bias=sums, a=upload(a), b=upload(b))
    assert download(sums, n) == [sum(b[j * k:(j + 1) * k]) for j in range(n)]
    # TF32 forgets what f32 keeps.
    odd = upload([1.0 + 2.0 ** -12])
    assert download(matmul(1, 1, 1, compute=68, a=odd, b=odd), 1) != [1.0]
    assert download(matmul(1, 1, 1, compute=77, a=odd, b=odd), 1) == [1.0]
    assert matmul(1, 1, 1, compute=70, a=odd, b=odd) == 15


class Cudnn:
    """A convolution x[n,h,w,c] * w[k,r,s,c] -> y[n,oh,ow,k] in NHWC."""

    def __init__(self, kind=0, math_type=3, n=2, h=7, w=6, channels=3, k=4, r=3, s=2, pad=(1, 0), stride_=(2, 1)):
        self.dnn = library("libcudnn.so.9")
        self.handle, self.x, self.y, self.w, self.conv = p(), p(), p(), p(), p()
        self.stream = stream()
        self.call("Create", c.byref(self.handle))
        self.call("SetStream", self.handle, self.stream)
        for name, d in [("Tensor", self.x), ("Tensor", self.y), ("Filter", self.w), ("Convolution", self.conv)]:
            self.call(f"Create{name}Descriptor", c.byref(d))
        self.call("SetTensor4dDescriptor", self.x, 1, kind, n, channels, h, w)
        self.call("SetFilter4dDescriptor", self.w, kind, 1, k, channels, r, s)
        self.call("SetConvolution2dDescriptor", self.conv, *pad, *stride_, 1, 1, 1, 0)
        self.call("SetConvolutionMathType", self.conv, math_type)
        dims = [c.c_int() for _ in range(4)]
        self.call("GetConvolution2dForwardOutputDim", self.conv, self.x, self.w, *map(c.byref, dims))
        self.dims = (n, h, w, channels, k, r, s, dims[2].value, dims[3].value)
        self.pad, self.step = pad, stride_
        self.call("SetTensor4dDescriptor", self.y, 1, kind, *[d.value for d in dims])

    def call(self, name, *arguments):
        call("cudnn" + name, *arguments, of=self.dnn)

    def taps(self):
        n, h, w, channels, k, r, s, oh, ow = self.dims
        for b in range(n):
            for i in range(oh):
                for j in range(ow):
                    for y in range(r):
                        for x in range(s):
                            at = i * self.step[0] - self.pad[0] + y, j * self.step[1] - self.pad[1] + x
                            if 0 <= at[0] < h and 0 <= at[1] < w:
                                for ch in range(channels):
                                    for o in range(k):
                                        yield ((b * h + at[0]) * w + at[1]) * channels + ch, ((o * r + y) * s + x) * channels + ch, ((b * oh + i) * ow + j) * k + o

    def sizes(self):
        n, h, w, channels, k, r, s, oh, ow = self.dims
        return n * h * w * channels, k * r * s * channels, n * oh * ow * k


@case()
def convolutions():
    start()
    one, zero = c.c_float(1), c.c_float(0)
    for kind in (0, 9):
        of = 14 if kind == 9 else 0
        d = Cudnn(kind)
        nx, nw, ny = d.sizes()
        x, w, dy = [float(i % 5 - 2) for i in range(nx)], [float(i % 3 - 1) for i in range(nw)], [float(i % 4 - 1) for i in range(ny)]
        y, dx, dw = [0.0] * ny, [0.0] * nx, [0.0] * nw
        for ix, iw, iy in d.taps():
            y[iy] += x[ix] * w[iw]
            dx[ix] += dy[iy] * w[iw]
            dw[iw] += dy[iy] * x[ix]
        px, pw, pdy = (from_float(v, of) for v in (x, w, dy))
        need = size()
        algorithm = 1
        results, found = (c.c_uint8 * (48 * 8))(), c.c_int()
        d.call("GetConvolutionForwardAlgorithm_v7", d.handle, d.x, d.w, d.conv, d.y, 8, c.byref(found), results)
        assert found.value == 8 and list(memoryview(results).cast("B").cast("i"))[:2] == [1, 0]
        d.call("GetConvolutionForwardWorkspaceSize", d.handle, d.x, d.w, d.conv, d.y, algorithm, c.byref(need))
        work = alloc(need.value, c.c_uint8)
        out = from_float([9.0] * ny, of)
        d.call("ConvolutionForward", d.handle, c.byref(one), d.x, px, d.w, pw, d.conv, algorithm, work, need, c.byref(zero), d.y, out)
        synchronize(d.stream)
        assert to_float(out, ny, of) == y
        fails(2006, "cudnnConvolutionForward", d.handle, c.byref(one), d.x, px, d.w, pw, d.conv, algorithm, work, size(1), c.byref(zero), d.y, out, of=d.dnn)
        fails(3000, "cudnnConvolutionForward", d.handle, c.byref(one), d.x, px, d.w, pw, d.conv, 6, work, need, c.byref(zero), d.y, out, of=d.dnn)
        d.call("GetConvolutionBackwardDataWorkspaceSize", d.handle, d.w, d.y, d.conv, d.x, algorithm, c.byref(need))
        work, out = alloc(need.value, c.c_uint8), from_float([0.0] * nx, of)
        d.call("ConvolutionBackwardData", d.handle, c.byref(one), d.w, pw, d.y, pdy, d.conv, algorithm, work, need, c.byref(zero), d.x, out)
        synchronize(d.stream)
        assert to_float(out, nx, of) == dx
        d.call("GetConvolutionBackwardFilterWorkspaceSize", d.handle, d.x, d.y, d.conv, d.w, algorithm, c.byref(need))
        work, out = alloc(need.value, c.c_uint8), from_float([1.0] * nw, of)
        d.call("ConvolutionBackwardFilter", d.handle, c.byref(one), d.x, px, d.y, pdy, d.conv, algorithm, work, need, c.byref(one), d.w, out)
        synchronize(d.stream)
        assert to_float(out, nw, of) == [v + 1.0 for v in dw]
        # Bias and ReLU in one.
        bias_d, activation = p(), p()
        d.call("CreateTensorDescriptor", c.byref(bias_d))
        d.call("SetTensor4dDescriptor", bias_d, 1, kind, 1, 4, 1, 1)
        d.call("CreateActivationDescriptor", c.byref(activation))
        d.call("SetActivationDescriptor", activation, 1, 0, c.c_double(0))
        out = from_float([0.0] * ny, of)
        d.call("ConvolutionBiasActivationForward", d.handle, c.byref(one), d.x, px, d.w, pw, d.conv, 0, None, size(0), c.byref(zero), d.y, out, bias_d,
               from_float([1.0, -1.0, 2.0, 0.0], of), activation, d.y, out)
        synchronize(d.stream)
        assert to_float(out, ny, of) == [max(v + (1.0, -1.0, 2.0, 0.0)[i % 4], 0.0) for i, v in enumerate(y)]
    # True f32 only by CUDNN_FMA_MATH.
    for math_type, wanted in [(0, [1.0]), (3, [(1 + 2.0 ** -12) ** 2])]:
        d = Cudnn(0, math_type, 1, 1, 1, 1, 1, 1, 1, (0, 0), (1, 1))
        v, out = upload([1 + 2.0 ** -12]), alloc(1)
        d.call("ConvolutionForward", d.handle, c.byref(one), d.x, v, d.w, v, d.conv, 0, None, size(0), c.byref(zero), d.y, out)
        synchronize(d.stream)
        assert abs(download(out, 1)[0] - wanted[0]) < 1e-7
    # An NHWC filter with NCHW tensors.
    d = Cudnn()
    d.call("SetTensor4dDescriptor", d.x, 0, 0, *[d.dims[i] for i in (0, 3, 1, 2)])
    fails(3004, "cudnnGetConvolutionForwardWorkspaceSize", d.handle, d.x, d.w, d.conv, d.y, 1, c.byref(size()), of=d.dnn)


# ---- NCCL

class Id(c.Structure):
    _fields_ = [("bytes", c.c_char * 128)]


def nccl():
    return library("libnccl.so.2")


FLOAT, BF16, SUM, AVG = 7, 9, 0, 4


def async_error(comm):
    error = c.c_int()
    call("ncclCommGetAsyncError", comm, c.byref(error), of=nccl())
    return error.value


def wait_for(condition, seconds=5.0):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it never came"
        time.sleep(0.01)


@case(FAKE_CUDA_DEVICES="4", FAKE_CUDA_DELAY_US="300")
def all_reduce_in_one_process():
    lib = nccl()
    contexts = [start(d) for d in range(4)]
    comms = (p * 4)()
    fails(5, "ncclCommInitAll", comms, 2, (c.c_int * 2)(1, 1), of=lib)
    call("ncclCommInitAll", comms, 4, None, of=lib)
    n = 300_001  # more than a chunk
    streams, buffers = [], []
    for d in range(4):
        call("cuCtxSetCurrent", contexts[d])
        streams.append(stream())
        buffers.append(upload([float(d + 1)] * n))
    for operation, wanted in [(SUM, 10.0), (AVG, 10.0)]:
        call("ncclGroupStart", of=lib)
        for d in range(4):
            call("ncclAllReduce", buffers[d], buffers[d], size(n), FLOAT, operation, p(comms[d]), streams[d], of=lib)
        call("ncclGroupEnd", of=lib)
        for d in range(4):
            call("cuCtxSetCurrent", contexts[d])
            synchronize(streams[d])
            got = download(buffers[d], n)
            assert got[0] == got[-1] == wanted and len(set(got)) == 1
    gathered = []
    for d in range(4):
        call("cuCtxSetCurrent", contexts[d])
        gathered.append(alloc(4 * n))
        call("cuMemsetD32_v2", buffers[d], c.c_uint(d), size(n))
    call("ncclGroupStart", of=lib)
    for d in range(4):
        call("ncclAllGather", buffers[d], gathered[d], size(n), 3, p(comms[d]), streams[d], of=lib)
        call("ncclReduceScatter", gathered[d], buffers[d], size(n), 3, SUM, p(comms[d]), streams[d], of=lib)
        call("ncclBroadcast", buffers[d], gathered[d], size(n), 3, 2, p(comms[d]), streams[d], of=lib)
        call("ncclReduce", buffers[d], gathered[d], size(4), 3, SUM, 1, p(comms[d]), streams[d], of=lib)
    call("ncclGroupEnd", of=lib)
    for d in range(4):
        call("cuCtxSetCurrent", contexts[d])
        synchronize(streams[d])
        assert set(download(buffers[d], n, c.c_uint)) == {4 * d}
        assert download(gathered[d], 5, c.c_uint) == ([24] * 4 if d == 1 else [8] * 4) + [8]
    # One thread must group.
    fails(5, "ncclAllReduce", buffers[1], buffers[1], size(1), FLOAT, SUM, p(comms[1]), streams[1], of=lib)


@case(FAKE_CUDA_DEVICES="2", FAKE_CUDA_DELAY_US="1000")
def all_reduce_in_a_graph():
    """A step of two towers: a kernel, the collective on a second stream beside another kernel, a last kernel behind both."""
    lib, comms = nccl(), (p * 2)()
    contexts = [start(d) for d in range(2)]
    call("ncclCommInitAll", comms, 2, None, of=lib)
    streams, others, adders, instances, gradients, rest, forks, joins = ([] for _ in range(8))
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        streams.append(stream())
        others.append(stream())
        gradients.append(upload([float(d)] * 8))
        rest.append(upload([0.0] * 8))
        forks.append(event(2))
        joins.append(event(2))
        adders.append(function(module(), "add_one"))
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        call("cuStreamBeginCapture_v2", streams[d], 1)
        launch(adders[d], 1, 8, streams[d], gradients[d], c.c_int(8))
        call("cuEventRecord", forks[d], streams[d])
        call("cuStreamWaitEvent", others[d], forks[d], 0)
        launch(adders[d], 1, 8, streams[d], rest[d], c.c_int(8))
    call("ncclGroupStart", of=lib)
    for d in range(2):
        call("ncclAllReduce", gradients[d], gradients[d], size(8), FLOAT, AVG, p(comms[d]), others[d], of=lib)
    call("ncclGroupEnd", of=lib)
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        call("cuEventRecord", joins[d], others[d])
        call("cuStreamWaitEvent", streams[d], joins[d], 0)
        launch(adders[d], 1, 8, streams[d], gradients[d], c.c_int(8))
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        graph, instance = p(), p()
        call("cuStreamEndCapture", streams[d], c.byref(graph))
        call("cuGraphInstantiateWithFlags", c.byref(instance), graph, c.c_ulonglong(0))
        instances.append(instance)
    for _ in range(5):
        for d in range(2):
            call("cuCtxSetCurrent", contexts[d])
            call("cuGraphLaunch", instances[d], streams[d])
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        synchronize(streams[d])
        assert download(gradients[d], 8) == [10.5] * 8 and download(rest[d], 8) == [5.0] * 8


def rank_of(rank, ranks, identity, nonblocking=False):
    lib, comm = nccl(), p()
    i = Id.from_buffer_copy(bytes.fromhex(identity))
    if not nonblocking:
        call("ncclCommInitRank", c.byref(comm), ranks, i, rank, of=lib)
        return comm
    config = (c.c_uint8 * 128)()
    c.c_size_t.from_buffer(config, 0).value = 128
    c.c_uint.from_buffer(config, 8).value = 0xCAFEBEEF
    assert lib.ncclCommInitRankConfig(c.byref(comm), ranks, i, rank, config) == 7
    wait_for(lambda: async_error(comm) == 0)
    return comm


def new_id():
    i = Id()
    call("ncclGetUniqueId", c.byref(i), of=nccl())
    return bytes(i).hex()


def other_process(*arguments, **environment):
    return subprocess.Popen([sys.executable, __file__, "--run", *arguments], env={**os.environ, **environment})


@case(FAKE_CUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="0,1")
def all_reduce_between_processes():
    """Two processes of two devices each."""
    identity = new_id()
    peer = other_process("two_ranks", "2", identity, CUDA_VISIBLE_DEVICES="2,3")
    two_ranks("0", identity)
    assert peer.wait(20) == 0
    assert not pathlib.Path(bytes.fromhex(identity).rstrip(b"\0").decode()).exists()


@case()
def two_ranks(first="0", identity=None):
    if identity is None:
        return
    lib, first = nccl(), int(first)
    contexts = [start(d) for d in range(2)]
    comms = [p(), p()]
    call("ncclGroupStart", of=lib)
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        call("ncclCommInitRank", c.byref(comms[d]), 4, Id.from_buffer_copy(bytes.fromhex(identity)), first + d, of=lib)
    call("ncclGroupEnd", of=lib)
    streams, buffers = [], []
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        streams.append(stream())
        buffers.append(upload([10.0 ** (first + d), 1.0]))
    for _ in range(20):
        call("ncclGroupStart", of=lib)
        for d in range(2):
            call("ncclAllReduce", buffers[d], buffers[d], size(2), FLOAT, AVG, comms[d], streams[d], of=lib)
        call("ncclGroupEnd", of=lib)
    for d in range(2):
        call("cuCtxSetCurrent", contexts[d])
        synchronize(streams[d])
        assert download(buffers[d], 2) == [277.75, 1.0]
        call("ncclCommDestroy", comms[d], of=lib)


@case(FAKE_CUDA_DEVICES="2")
def a_dead_peer():
    identity = new_id()
    peer = other_process("dies_after_a_while", "1", identity, CUDA_VISIBLE_DEVICES="1")
    start(0)
    comm = rank_of(0, 2, identity, nonblocking=True)
    s, x = stream(), upload([1.0])
    assert nccl().ncclAllReduce(x, x, size(1), FLOAT, SUM, comm, s) in (0, 7)
    synchronize(s)
    assert nccl().ncclAllReduce(x, x, size(1), FLOAT, SUM, comm, s) in (0, 7)
    began = time.time()
    wait_for(lambda: async_error(comm) == 6)
    assert time.time() - began < 2 and driver.cuStreamQuery(s) == 600, "the kernel still waits"
    call("ncclCommAbort", comm, of=nccl())
    synchronize(s)
    peer.wait(5)  # a zombie until now: its death was seen all the same


@case()
def dies_after_a_while(rank="1", identity=None):
    if identity is None:
        return
    start(0)
    comm = rank_of(int(rank), 2, identity)
    s, x = stream(), upload([1.0])
    call("ncclAllReduce", x, x, size(1), FLOAT, SUM, comm, s, of=nccl())
    synchronize(s)
    time.sleep(0.2)
    os.kill(os.getpid(), 9)


def at_once(work):
    """What work(0) and work(1) return, run beside each other."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        return list(pool.map(work, range(2)))


@case(FAKE_CUDA_DEVICES="2")
def nccl_misuse():
    lib, identity, comms = nccl(), new_id(), [None, None]

    def work(rank):
        start(rank)
        comms[rank] = comm = rank_of(rank, 2, identity)
        s, x = stream(), upload([1.0] * 8)
        y = alloc(8)
        fails(4, "ncclAllReduce", x, y, size(9), FLOAT, SUM, comm, s, of=lib) if rank == 0 else time.sleep(0.3)
        # Different counts.
        call("ncclAllReduce", x, y, size(8 - rank), FLOAT, SUM, comm, s, of=lib)
        wait_for(lambda: async_error(comm) == 5)
        call("ncclCommAbort", comm, of=lib)
        synchronize(s)

    at_once(work)
    # Two ranks on one GPU.
    identity = new_id()

    def same(rank):
        start(0)
        return lib.ncclCommInitRank(c.byref(p()), 2, Id.from_buffer_copy(bytes.fromhex(identity)), rank)

    assert at_once(same) == [5, 5]


# ---- AddressSanitizer

ASAN = {"FAKE_CUDA_ASAN": "1", "ASAN_OPTIONS": "detect_leaks=0:exitcode=77"}


@case(**ASAN)
def asan_is_content():
    reductions()
    warp_operations()
    graphs()


@case(**ASAN)
def asan_sees_global_memory():
    start()
    s, x = stream(), alloc(10)
    launch(function(module(), "past_the_end"), 1, 32, s, x, c.c_int(10))
    synchronize(s)


@case(**ASAN)
def asan_sees_shared_memory():
    start()
    s = stream()
    launch(function(module(), "dynamic_past_the_end"), 1, 64, s, alloc(1), shared=252)
    synchronize(s)


# Cases that must end in a crash, and what they say.
DEADLY = {"guard_zones": "GUARD: device 0: something wrote past the end of an allocation of 40 bytes", "far_beyond_the_end": "kernel past_the_end: block 0,0,0, thread 0,0,0: illegal address",
          "divergent_barriers": "threads wait at different barriers",
          "asan_sees_global_memory": "in past_the_end", "asan_sees_shared_memory": "in dynamic_past_the_end"}
CHECKS = {"counters_and_leaks": check_counters_and_leaks, "graphs": check_graphs}
PEERS = ["two_ranks", "dies_after_a_while"]


def run_all(arguments):
    asan = "--asan" in arguments
    wanted = [a for a in arguments if a != "--asan"] or [name for name in CASES if name not in PEERS and (asan or not name.startswith("asan"))]
    failed = []
    with tempfile.TemporaryDirectory() as work:
        work = pathlib.Path(work)
        out = os.environ.get("FAKE_CUDA_OUT")
        if not out:
            out = str(work / "lib")
            subprocess.run([HERE / "build.sh", out], check=True)
        for name in wanted:
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("FAKE_", "CUDA_"))}
            environment.update(FAKE_CUDA_OUT=out, FAKE_CUDA_CACHE=str(work / "cache"), **CASES[name][1])
            if name.startswith("asan"):
                environment["LD_PRELOAD"] = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
            began = time.time()
            try:
                done = subprocess.run([sys.executable, __file__, "--run", name], env=environment, cwd=work, capture_output=True, text=True, timeout=60)
                error = None
                if name in DEADLY:
                    if done.returncode == 0 or DEADLY[name] not in done.stderr:
                        error = f"it did not die of \"{DEADLY[name]}\""
                elif done.returncode:
                    error = f"exit code {done.returncode}"
                elif name in CHECKS:
                    CHECKS[name](done, work)
            except (AssertionError, subprocess.TimeoutExpired) as caught:
                error = repr(caught)
            print(f"{'FAILED' if error else 'ok':6} {name} ({time.time() - began:.1f} s)", flush=True)
            if error:
                print(f"  {error}\n{done.stdout}{done.stderr}"[:4000])
                failed.append(name)
    if failed:
        sys.exit(f"failed: {' '.join(failed)}")


if __name__ == "__main__":
    if "--run" in sys.argv[1:2]:
        CASES[sys.argv[2]][0](*sys.argv[3:])
    else:
        run_all(sys.argv[1:])
