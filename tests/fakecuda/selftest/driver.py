"""Devices, kernels, memory."""
import json
import math

from cases import *

NOT_NUMBERS = 0x7FCD7FCD


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


@case(dies='threads wait at different barriers')
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


def check_counters_and_leaks(done, folder):
    assert "40 bytes were never freed" in done.stderr, done.stderr
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["launch"] == 3 and trace["kernels"] == {"fill": 3} and trace["leaked_bytes"] == 40, trace
    assert trace["copies_d2h"] == 2 and trace["pageable_copies"] == 1 and trace["hostalloc"] == 1, trace


@case(FAKE_CUDA_LEAKS="1", FAKE_CUDA_TRACE="trace.json", check=check_counters_and_leaks)
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


@case(dies='GUARD: device 0: something wrote past the end of an allocation of 40 bytes')
def guard_zones():
    start()
    s, x = stream(), alloc(10)
    launch(function(module(), "past_the_end"), 1, 32, s, x, c.c_int(10))
    synchronize(s)


@case(dies='kernel past_the_end: block 0,0,0, thread 0,0,0: illegal address')
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
