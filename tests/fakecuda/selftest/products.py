"""cuBLASLt and cuDNN."""
import struct

from cases import *


def to_float(bits, count, kind):
    return [struct.unpack("<f", struct.pack("<I", b << 16))[0] for b in download(bits, count, c.c_uint16)] if kind == 14 else download(bits, count)


def from_float(values, kind):
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
