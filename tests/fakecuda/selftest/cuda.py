"""A few lines over the driver API, NVRTC and the libraries by ctypes, for selftest.py."""
import ctypes as c
import os

OUT = os.environ.get("FAKE_CUDA_OUT")


def library(name):
    return c.CDLL(os.path.join(OUT, name))


driver = library("libcuda.so.1") if OUT else None


class CudaError(Exception):
    def __init__(self, call, code):
        super().__init__(f"{call}: {code}")
        self.code = code


def call(name, *arguments, of=driver):
    """Calls, and raises what is not success."""
    code = getattr(of, name)(*arguments)
    if code:
        raise CudaError(name, code)


def fails(code, name, *arguments, of=driver):
    got = getattr(of, name)(*arguments)
    assert got == code, f"{name} returned {got}, not {code}"


p = c.c_void_p
size = c.c_size_t


def start(device=0):
    call("cuInit", 0)
    context = p()
    call("cuDevicePrimaryCtxRetain", c.byref(context), device)
    call("cuCtxSetCurrent", context)
    return context


def alloc(count, of=c.c_float):
    pointer = c.c_uint64()
    call("cuMemAlloc_v2", c.byref(pointer), size(count * c.sizeof(of)))
    return pointer


def pinned(count, of=c.c_float):
    pointer = p()
    call("cuMemHostAlloc", c.byref(pointer), size(count * c.sizeof(of)), 0)
    return (of * count).from_address(pointer.value)


def stream():
    s = p()
    call("cuStreamCreate", c.byref(s), 1)
    return s


def event(flags=0):
    e = p()
    call("cuEventCreate", c.byref(e), flags)
    return e


def upload(values, of=c.c_float):
    host = (of * len(values))(*values)
    pointer = alloc(len(values), of)
    call("cuMemcpyHtoD_v2", pointer, host, size(c.sizeof(host)))
    return pointer


def download(pointer, count, of=c.c_float):
    host = (of * count)()
    call("cuMemcpyDtoH_v2", host, pointer, size(c.sizeof(host)))
    return list(host)


def compile_kernels(source, *options, name="test.cu"):
    """The image, or raises RuntimeError with the log."""
    nvrtc = library("libnvrtc.so.13")
    program = p()
    call("nvrtcCreateProgram", c.byref(program), source.encode(), name.encode(), 0, None, None, of=nvrtc)
    texts = (c.c_char_p * max(len(options), 1))(*[o.encode() for o in options])
    code = nvrtc.nvrtcCompileProgram(program, len(options), texts)
    length = size()
    call("nvrtcGetProgramLogSize", program, c.byref(length), of=nvrtc)
    log = c.create_string_buffer(length.value)
    call("nvrtcGetProgramLog", program, log, of=nvrtc)
    if code:
        raise RuntimeError(code, log.value.decode())
    call("nvrtcGetPTXSize", program, c.byref(length), of=nvrtc)
    image = c.create_string_buffer(length.value)
    call("nvrtcGetPTX", program, image, of=nvrtc)
    return image


def load(image):
    module = p()
    call("cuModuleLoadData", c.byref(module), image)
    return module


def function(module, name):
    f = p()
    call("cuModuleGetFunction", c.byref(f), module, name.encode())
    return f


def pack(arguments):
    array = (p * max(len(arguments), 1))()
    for i, argument in enumerate(arguments):
        array[i] = c.cast(c.byref(argument), p)
    return array


def launch(f, grid, block, s, *arguments, shared=0):
    three = lambda n: (tuple(n) + (1, 1))[:3] if isinstance(n, tuple) else (n, 1, 1)
    call("cuLaunchKernel", f, *three(grid), *three(block), shared, s, pack(arguments), None)


def synchronize(s):
    call("cuStreamSynchronize", s)


