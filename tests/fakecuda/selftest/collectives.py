"""NCCL, within a process and between two."""
import concurrent.futures
import os
import pathlib
import subprocess
import sys
import time

from cases import *


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
    return subprocess.Popen([sys.executable, sys.argv[0], "--run", *arguments], env={**os.environ, **environment})


@case(FAKE_CUDA_DEVICES="4", CUDA_VISIBLE_DEVICES="0,1")
def all_reduce_between_processes():
    """Two processes of two devices each."""
    identity = new_id()
    peer = other_process("two_ranks", "2", identity, CUDA_VISIBLE_DEVICES="2,3")
    two_ranks("0", identity)
    assert peer.wait(20) == 0
    assert not pathlib.Path(bytes.fromhex(identity).rstrip(b"\0").decode()).exists()


@case(peer=True)
def two_ranks(first, identity):
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


@case(peer=True)
def dies_after_a_while(rank, identity):
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
