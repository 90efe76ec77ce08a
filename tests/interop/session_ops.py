"""Writes tests/golden/session_ops.json: what TensorFlow's operations make of given tensors.

usage: session_ops.py OUT
"""

import json
import sys

import numpy as np
import tensorflow.compat.v1 as tf

R = tf.raw_ops
F, D, I, L, B, S = np.float32, np.float64, np.int32, np.int64, np.bool_, object
rng = np.random.RandomState(7)
cases = []


def real(*shape, dtype=F, low=-2, high=2):
    return np.round(rng.uniform(low, high, shape), 2).astype(dtype)


def whole(*shape, dtype=I, low=-5, high=6):
    return rng.randint(low, high, shape).astype(dtype)


def as_array(value):
    # NumPy cuts zero bytes off the end of its own strings.
    return np.array(value, S) if isinstance(value, bytes) else np.asarray(value)


def values(array):
    if array.dtype.kind in "OS":
        return [v.decode("latin-1") if isinstance(v, bytes) else str(v) for v in array.ravel()]
    if array.dtype.kind == "f":
        return [float(v) if np.isfinite(v) else str(v) for v in array.ravel()]
    return [v.item() for v in array.ravel()]


def tensor(array):
    array = as_array(array)
    kind = tf.string if array.dtype.kind in "OSU" else tf.as_dtype(array.dtype)
    return {"dtype": kind.as_datatype_enum, "shape": list(array.shape), "values": values(array)}


def case(op, *operands, **attrs):
    """Operands are given by position, those in lists as lists; attributes by name."""
    function = getattr(R, op)
    with tf.Graph().as_default() as graph:
        feeds, fed = {}, []

        def hold(value):
            if isinstance(value, list):
                return [hold(v) for v in value]
            value = np.asarray(value)
            kind = tf.string if value.dtype.kind in "OSU" else tf.as_dtype(value.dtype)
            # Without a shape, so that it is the kernel that refuses.
            place = tf.placeholder(kind)
            feeds[place] = value
            fed.append(value)
            return place

        names = [n for n in function.__signature__.parameters if n not in ("name",)]
        given = dict(zip([n for n in names if n not in attrs], map(hold, operands)))
        result = function(**given, **attrs)
        node = (result[0] if isinstance(result, (list, tuple)) else result).op
        outputs = list(node.outputs)
        # The order of inputs is the node's, not the signature's.
        by_name = {place.op.name: value for place, value in feeds.items()}
        inputs = [by_name[i.op.name] for i in node.inputs]
        definition = node.node_def
        definition.name = op
        del definition.input[:]
        definition.input.extend(f"i{k}" for k in range(len(inputs)))
        row = {"op": op, "node": definition.SerializeToString().hex(), "inputs": [tensor(i) for i in inputs]}
        with tf.Session(graph=graph) as session:
            try:
                row["outputs"] = [tensor(o) for o in session.run(outputs, feeds)]
            except tf.errors.OpError as error:
                row["error"] = error.error_code
        cases.append(row)


SHAPES = [((3,), (3,)), ((), ()), ((2, 3), (3,)), ((2, 1), (1, 3)), ((0, 3), (3,)), ((2, 3), ()), ((2, 2, 1), (1, 3))]
for op in ["AddV2", "Sub", "Mul", "Maximum", "Minimum", "SquaredDifference"]:
    for a, b in SHAPES:
        case(op, real(*a), real(*b))
    for kind in (I, L):
        case(op, whole(2, 3, dtype=kind), whole(3, dtype=kind))
    case(op, real(2, dtype=D), real(2, dtype=D))
case("Add", np.array(["a", "b"], S), np.array("c", S))
case("AddV2", real(2), real(3))
for op in ["RealDiv", "Div", "DivNoNan", "MulNoNan"]:
    case(op, real(2, 3), real(3, low=1))
case("DivNoNan", real(2), np.array([0, 2], F))
for op in ["FloorDiv", "FloorMod"]:
    for kind in (I, L):
        case(op, np.array([7, -7, 7, -7, 0], kind), np.array([3, 3, -3, -3, 5], kind))
    case(op, np.array([7, -7, 7.5, -7], F), np.array([3, 3, -3, -3], F))
    case(op, whole(2), np.array([0, 1], I))
for op in ["TruncateDiv", "TruncateMod", "Mod", "Div"]:
    case(op, np.array([7, -7, 7, -7], I), np.array([3, 3, -3, -3], I))
case("Pow", real(3, low=0), real(3))
case("Pow", whole(3), np.array([0, 1, 3], I))
for op in ["Less", "LessEqual", "Greater", "GreaterEqual"]:
    case(op, whole(2, 3, low=0, high=3), whole(3, low=0, high=3))
    case(op, real(4), real(4))
for op in ["Equal", "NotEqual"]:
    case(op, whole(2, 3, low=0, high=2), whole(3, low=0, high=2))
    case(op, np.array(["a", "b"], S), np.array("b", S))
    case(op, np.array([True, False]), np.array([True, True]))
    case(op, real(2), real(3), incompatible_shape_error=False)
for op in ["LogicalAnd", "LogicalOr"]:
    case(op, np.array([[True, False], [True, False]]), np.array([True, False]))
case("LogicalNot", np.array([True, False]))
for op in ["Neg", "Abs", "Sign", "Square", "Relu", "Relu6"]:
    case(op, real(2, 3, high=8))
    case(op, whole(4))
for op in ["Floor", "Ceil", "Round", "Rint", "Exp", "Expm1", "Sin", "Cos", "Tan", "Tanh", "Sigmoid", "Softplus", "Softsign", "Elu", "Reciprocal", "Inv"]:
    case(op, np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 30.0, -30.0], F))
    case(op, real(2, 2, dtype=D))
for op in ["Sqrt", "Rsqrt", "Log", "Log1p"]:
    case(op, real(4, low=0.1))
    case(op, real(0, 2, low=0.1))
for op in ["IsNan", "IsInf", "IsFinite"]:
    case(op, np.array([np.nan, np.inf, -np.inf, 1], F))
for op in ["ReluGrad", "Relu6Grad", "EluGrad", "SoftplusGrad", "SoftsignGrad", "SigmoidGrad", "TanhGrad", "SqrtGrad", "RsqrtGrad", "ReciprocalGrad", "InvGrad"]:
    case(op, real(2, 3), real(2, 3))
case("Select", np.array([True, False]), real(2, 3), real(2, 3))
case("Select", np.array(True), real(2), real(2))
case("Select", np.array([[True, False]]), whole(1, 2), whole(1, 2))
case("SelectV2", np.array([True, False, True]), real(2, 3), real())
for source in (np.array([-1.7, 0, 2.9], F), np.array([-1, 0, 3], I), np.array([True, False]), np.array([2**40, -1], L), real(2, dtype=D)):
    for target in (tf.float32, tf.float64, tf.int32, tf.int64, tf.bool):
        case("Cast", source, DstT=target)
case("ClipByValue", real(5), np.float32(-1), np.float32(0.5))

for op in ["Sum", "Mean", "Prod", "Max", "Min"]:
    for axes in ([], [0], [1], [0, 1], [-1], [0, 2], [1, 2]):
        shape = (2, 3, 2) if 2 in axes else (2, 3)
        case(op, real(*shape), np.array(axes, I), keep_dims=len(axes) == 1)
    case(op, whole(3, 2), np.array([0], L))
    case(op, real(), np.array([], I))
    case(op, real(0, 2), np.array([0], I))
    case(op, real(2), np.array([1], I))
case("Sum", real(500), np.array([0], I))
for op in ["All", "Any"]:
    case(op, np.array([[True, False], [True, True]]), np.array([0], I))
    case(op, np.zeros((0, 2), B), np.array([0], I))
for op in ["ArgMax", "ArgMin"]:
    case(op, real(3, 4), np.int32(1))
    case(op, whole(3, 4, low=0, high=2), np.int32(0), output_type=tf.int32)
    case(op, real(0, 4), np.int32(0))
case("AddN", [real(2, 2), real(2, 2), real(2, 2)])
case("L2Loss", real(3, 3))
for a, b, attrs in [((2, 3), (3, 4), {}), ((3, 2), (3, 4), {"transpose_a": True}), ((2, 3), (4, 3), {"transpose_b": True}), ((3, 2), (4, 3), {"transpose_a": True, "transpose_b": True}), ((0, 3), (3, 2), {}), ((2, 0), (0, 2), {}), ((2, 3), (2, 3), {})]:
    case("MatMul", real(*a), real(*b), **attrs) if a != (2, 3) or b != (2, 3) else None
    if b[0] == 3 and not attrs:
        case("MatMul", whole(*a), whole(*b))
        case("MatMul", real(*a, dtype=D), real(*b, dtype=D))
case("BatchMatMulV2", real(2, 2, 3), real(1, 3, 2))
case("BatchMatMul", real(2, 2, 3), real(2, 2, 3), adj_y=True)
case("Cumsum", real(2, 3), np.int32(1))
case("Cumsum", real(2, 3), np.int32(0), exclusive=True, reverse=True)

for shape in ((), (0,), (2, 3)):
    case("Shape", real(*shape))
    case("Shape", real(*shape), out_type=tf.int64)
    case("Size", real(*shape))
    case("Rank", real(*shape))
    case("ZerosLike", real(*shape))
    case("OnesLike", whole(*shape))
    case("Snapshot", real(*shape))
case("ShapeN", [real(2), real(0, 3)])
case("ZerosLike", np.array(["a"], S))
case("Reshape", real(2, 3), np.array([3, -1], I))
case("Reshape", np.array([True, False]), np.array([2, 1], L))
case("Reshape", np.array(["a"], S), np.array([], I))
case("ExpandDims", real(2, 3), np.int32(-1))
case("ExpandDims", real(2, 3), np.int32(1))
case("Squeeze", real(1, 3, 1))
case("Squeeze", whole(3, 1, dtype=L), axis=[1])
case("Fill", np.array([2, 2], I), np.float32(3))
case("Fill", np.array([], I), np.array("a", S))
case("Fill", np.array([0, 2], L), np.int32(3))
case("BroadcastTo", real(3, 1), np.array([2, 3, 2], I))
case("BroadcastTo", real(), np.array([2], I))
for a, b in [([2, 3], [3]), ([2, 1], [1, 3]), ([], [2]), ([2, 3], [2, 3]), ([1, 3], [1, 3]), ([1], [2, 1]), ([5, 1, 2], [1, 2])]:
    case("BroadcastGradientArgs", np.array(a, I), np.array(b, I))
case("BroadcastArgs", np.array([2, 1], I), np.array([3], I))
case("Range", np.int32(0), np.int32(7), np.int32(3))
case("Range", np.float32(1), np.float32(0), np.float32(-0.25))
case("Range", np.int64(3), np.int64(3), np.int64(1))
case("Range", np.int32(0), np.int32(7), np.int32(0))
case("LinSpace", np.float32(0), np.float32(1), np.int32(5))
case("Where", np.array([[True, False], [True, True]]))
case("Where", np.array([False]))
case("Where", np.array([0, 2, 0, -1], F))
case("OneHot", np.array([0, 2, -1], I), np.int32(3), np.float32(1), np.float32(0))
case("OneHot", np.array([[0, 1]], L), np.int32(2), np.float32(5), np.float32(-1), axis=0)
case("InvertPermutation", np.array([2, 0, 1], I))
case("EnsureShape", real(2, 3), shape=[2, None])
case("EnsureShape", real(2, 3), shape=[None, None])
case("CheckNumerics", np.array([1, np.nan], F), message="m")

for begin, end, step, masks in [
    ([1], [3], [1], {}), ([-3], [-1], [1], {}), ([0], [0], [2], {"begin_mask": 1, "end_mask": 1}), ([3], [0], [-1], {}),
    ([-1], [-9], [-2], {}), ([2], [3], [1], {"shrink_axis_mask": 1}), ([1, 0], [3, 2], [1, 2], {}), ([0, 1], [0, 2], [1, 1], {"ellipsis_mask": 1}),
    ([0, 1], [0, 3], [1, 1], {"new_axis_mask": 1}), ([9], [9], [1], {}), ([9], [9], [1], {"shrink_axis_mask": 1}), ([0, 0, 0], [0, 0, 1], [1, 1, 1], {"ellipsis_mask": 2, "begin_mask": 1, "end_mask": 1}),
]:
    case("StridedSlice", real(4, 3), np.array(begin, I), np.array(end, I), np.array(step, I), **masks) if begin != [9] or not masks else None
case("StridedSlice", np.array([5, 6], I), np.array([0], I), np.array([1], I), np.array([1], I), shrink_axis_mask=1)
case("StridedSliceGrad", np.array([4, 3], I), np.array([1], I), np.array([3], I), np.array([1], I), real(2, 3))
case("Slice", real(3, 4), np.array([1, 0], I), np.array([2, -1], I))
case("Slice", real(3, 4), np.array([0, 2], L), np.array([1, 2], L))
case("ReverseV2", real(2, 3), np.array([1], I))
case("Transpose", real(2, 3, 2), np.array([2, 0, 1], I))
case("Transpose", real(2, 0), np.array([1, 0], I))
case("ConcatV2", [real(2, 2), real(2, 1)], np.int32(1))
case("ConcatV2", [np.array(["a"], S), np.array(["b", "c"], S)], np.int32(-1))
case("ConcatV2", [whole(0), whole(2)], np.int32(0))
case("Concat", np.int32(0), [real(1, 2), real(2, 2)])
case("ConcatOffset", np.int32(1), [np.array([2, 3], I), np.array([2, 4], I)])
case("Pack", [real(2), real(2), real(2)], axis=0)
case("Pack", [real(2), real(2)], axis=1)
case("Pack", [np.array(True), np.array(False)], axis=0)
case("Unpack", real(2, 3), num=3, axis=1)
case("Split", np.int32(1), real(2, 4), num_split=2)
case("SplitV", real(5, 2), np.array([2, -1], I), np.int32(0), num_split=2)
case("Tile", real(2, 2), np.array([2, 3], I))
case("Tile", real(2, 2), np.array([0, 1], I))
case("Pad", real(2, 2), np.array([[1, 0], [0, 2]], I))
case("PadV2", whole(2), np.array([[1, 1]], I), np.int32(9))
case("GatherV2", real(3, 2), np.array([2, 0, 2], I), np.int32(0))
case("GatherV2", real(2, 3), np.array([[1], [0]], L), np.int32(1))
case("GatherV2", np.array(["a", "b"], S), np.array([1], L), np.int32(0))
case("GatherV2", real(3), np.array([3], I), np.int32(0))
case("GatherV2", real(3), np.array([], I), np.int32(0))
case("DynamicStitch", [np.array([0, 2], I), np.array([1], I)], [real(2, 2), real(1, 2)])
case("DynamicStitch", [np.array(1, I), np.array([0, 1], I)], [whole(), whole(2)])
case("DynamicPartition", real(4, 2), np.array([0, 1, 0, 1], I), num_partitions=2)
case("UnsortedSegmentSum", real(4, 2), np.array([0, 2, 0, -1], I), np.int32(3))

case("Unique", np.array([3, 1, 3, -2, 1], I))
case("Unique", np.array(["b", "a", "b"], S), out_idx=tf.int64)
case("StaticRegexFullMatch", np.array(["s3://a", "b"], S), pattern="^s3://.*")

case("Softmax", real(2, 4))
case("LogSoftmax", real(2, 4, dtype=D))
case("SparseSoftmaxCrossEntropyWithLogits", real(3, 4), np.array([0, 3, 1], L))
case("SparseSoftmaxCrossEntropyWithLogits", real(1, 4), np.array([4], I))
case("SoftmaxCrossEntropyWithLogits", real(2, 3), np.array([[0, 1, 0], [0.5, 0.5, 0]], F))
case("BiasAdd", real(2, 2, 3), real(3))
case("BiasAddGrad", real(2, 2, 3))
case("InTopK", real(3, 4), np.array([0, 1, 9], I), k=2)
case("InTopKV2", real(3, 4), np.array([0, 1, 3], I), np.int32(1))
case("TopKV2", real(2, 5), np.int32(2))
for padding in ("SAME", "VALID"):
    for shape, kernel, stride in [((2, 5, 6, 3), (3, 3, 3, 4), 1), ((1, 7, 5, 2), (3, 2, 2, 3), 2), ((2, 4, 4, 1), (1, 1, 1, 2), 1)]:
        strides = [1, stride, stride, 1]
        x, w = real(*shape), real(*kernel)
        case("Conv2D", x, w, strides=strides, padding=padding)
        y = np.array(cases[-1]["outputs"][0]["shape"])
        case("Conv2DBackpropInput", np.array(shape, I), w, real(*y), strides=strides, padding=padding)
        case("Conv2DBackpropFilter", x, np.array(kernel, I), real(*y), strides=strides, padding=padding)
    for shape, size, stride in [((2, 6, 6, 2), 3, 2), ((1, 5, 4, 3), 2, 1)]:
        attrs = {"ksize": [1, size, size, 1], "strides": [1, stride, stride, 1], "padding": padding}
        x = real(*shape)
        case("MaxPool", x, **attrs)
        out = cases[-1]["outputs"][0]
        y = np.array(out["values"], F).reshape(out["shape"])
        case("MaxPoolGrad", x, y, real(*y.shape), **attrs)
        case("AvgPool", x, **attrs)
        case("AvgPoolGrad", np.array(shape, I), real(*y.shape), **attrs)
case("LRN", real(1, 2, 2, 7), depth_radius=2, bias=1.0, alpha=0.1, beta=0.75)
x = real(1, 2, 2, 7)
case("LRN", x, depth_radius=4, bias=2.0, alpha=0.5, beta=0.5)
out = cases[-1]["outputs"][0]
case("LRNGrad", real(1, 2, 2, 7), x, np.array(out["values"], F).reshape(out["shape"]), depth_radius=4, bias=2.0, alpha=0.5, beta=0.5)

case("StringJoin", [np.array("a", S), np.array(["b", "c"], S)], separator="-")
case("ShardedFilename", np.array("p", S), np.int32(1), np.int32(3))
case("ScalarSummary", np.array("z", S), np.float32(1.5))
case("HistogramSummary", np.array("h", S), real(20))

for op in ("RandomUniform", "RandomStandardNormal", "TruncatedNormal"):
    for kind in (tf.float32, tf.float64):
        for seeds in ((1, 2), (87654321, 0), (-3, 2**40)):
            case(op, np.array([3, 7], I), dtype=kind, seed=seeds[0], seed2=seeds[1])
for kind in (I, L):
    case("RandomUniformInt", np.array([9], I), np.array(-2, kind), np.array(1000, kind), seed=3, seed2=4)

text = ",\n".join(json.dumps(row, separators=(",", ":")) for row in cases)
open(sys.argv[1], "w").write("[\n" + text + "\n]\n")
print(len(cases), "cases")
