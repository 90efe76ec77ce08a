"""Streams, events, captures, errors on demand."""
import json
import math
import time

from cases import *


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

def check_graphs(done, folder):
    trace = json.loads((folder / "trace.json").read_text())
    assert trace["graph"] == 3 and trace["graph_kernels"] == 9 and trace["launch"] == 3, trace


@case(FAKE_CUDA_TRACE="trace.json", check=check_graphs)
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
