"""Kernels under AddressSanitizer."""
from cases import *
from driver import reductions, warp_operations
from streams import graphs

ASAN = {"FAKE_CUDA_ASAN": "1", "ASAN_OPTIONS": "detect_leaks=0:exitcode=77"}


@case(**ASAN)
def asan_is_content():
    reductions()
    warp_operations()
    graphs()


@case(**ASAN, dies='in past_the_end')
def asan_sees_global_memory():
    start()
    s, x = stream(), alloc(10)
    launch(function(module(), "past_the_end"), 1, 32, s, x, c.c_int(10))
    synchronize(s)


@case(**ASAN, dies='in dynamic_past_the_end')
def asan_sees_shared_memory():
    start()
    s = stream()
    launch(function(module(), "dynamic_past_the_end"), 1, 64, s, alloc(1), shared=252)
    synchronize(s)
