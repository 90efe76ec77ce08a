//! The operations of sessions against TensorFlow's values (`tests/interop/session_ops.py` wrote them).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::sync::mpsc;

use bytes::Bytes;
use prost::Message;
use serde_json::Value as Json;
use tftrain::session::proto::attr_value::Value as Attr;
use tftrain::session::{
    Bell, Call, Cancellation, Code, Context, DType, Data, Node, OpError, Resources, Tensor, Value,
    ops, proto,
};

/// Differences that rounding explains: TensorFlow adds in another order, with other exponentials.
const TOLERANCE: f64 = 2e-5;

fn read(json: &Json) -> Tensor {
    let shape: Vec<usize> = json["shape"]
        .as_array()
        .unwrap()
        .iter()
        .map(|dim| dim.as_u64().unwrap() as usize)
        .collect();
    let values = json["values"].as_array().unwrap();
    let real = |v: &Json| v.as_f64().unwrap_or_else(|| v.as_str().unwrap().parse().unwrap());
    let whole = |v: &Json| v.as_i64().unwrap();
    // Bytes as characters of Latin-1.
    let text =
        |v: &Json| v.as_str().unwrap().chars().map(|c| u32::from(c) as u8).collect::<Bytes>();
    match DType::from_wire(json["dtype"].as_i64().unwrap() as i32).unwrap() {
        DType::F32 => Tensor::new(shape, values.iter().map(|v| real(v) as f32).collect()),
        DType::F64 => Tensor::new(shape, values.iter().map(real).collect()),
        DType::I32 => Tensor::new(shape, values.iter().map(|v| whole(v) as i32).collect()),
        DType::I64 => Tensor::new(shape, values.iter().map(whole).collect()),
        DType::U8 => Tensor::new(shape, values.iter().map(|v| whole(v) as u8).collect()),
        DType::Bool => Tensor::new(shape, values.iter().map(|v| v.as_bool().unwrap()).collect()),
        DType::Str => Tensor::new(shape, values.iter().map(text).collect()),
    }
    .unwrap()
}

/// Runs one node on a task's resources; outputs that it leaves open are left out.
fn step(
    resources: &Resources,
    cancellation: &Cancellation,
    node: &proto::NodeDef,
    inputs: Vec<Option<Value>>,
    outputs: usize,
) -> Result<Vec<Value>, OpError> {
    let op = ops::find(&node.op).unwrap_or_else(|| panic!("{} is not there", node.op));
    let kernel = (op.build)(&Node::new(node))?;
    let context = Context { resources, job: "ps" };
    let mut inputs = inputs;
    let mut results = vec![None; outputs];
    let mut call = Call::new(&context, &mut inputs, &mut results);
    (kernel.run)(&mut call)?;
    let Some(mut attempt) = call.waits_for() else {
        return Ok(results.into_iter().flatten().collect());
    };
    let (ring, rung) = mpsc::channel();
    let cancelled = ring.clone();
    cancellation.on_cancel(move |_| _ = cancelled.send(()));
    let bell = Bell::new(move || _ = ring.send(()));
    loop {
        cancellation.check()?;
        if let Some(found) = attempt(&bell) {
            return Ok((found?.outputs)()?.into_iter().map(Value::Tensor).collect());
        }
        rung.recv().unwrap();
    }
}

fn run(node: &proto::NodeDef, inputs: Vec<Tensor>, outputs: usize) -> Result<Vec<Tensor>, OpError> {
    let inputs = inputs.into_iter().map(|tensor| Some(Value::Tensor(tensor))).collect();
    let values = step(&Resources::default(), &Cancellation::default(), node, inputs, outputs)?;
    values.into_iter().map(|value| value.tensor()).collect()
}

/// The recorded cases: node, inputs, and the rest.
fn cases() -> Vec<(proto::NodeDef, Vec<Tensor>, Json)> {
    let cases: Json = serde_json::from_str(include_str!("golden/session_ops.json")).unwrap();
    let Json::Array(cases) = cases else { panic!("a list of cases") };
    let decode = |case: Json| {
        let hex = case["node"].as_str().unwrap();
        let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap();
        let bytes: Vec<u8> = (0..hex.len()).step_by(2).map(byte).collect();
        let inputs = case["inputs"].as_array().unwrap().iter().map(read).collect();
        (proto::NodeDef::decode(bytes.as_slice()).unwrap(), inputs, case)
    };
    cases.into_iter().map(decode).collect()
}

fn reals(tensor: &Tensor) -> Option<Vec<f64>> {
    match tensor.data() {
        Data::F32(v) => Some(v.iter().map(|x| f64::from(*x)).collect()),
        Data::F64(v) => Some(v.to_vec()),
        _ => None,
    }
}

fn close(ours: &Tensor, theirs: &Tensor) -> bool {
    if ours.shape() != theirs.shape() || ours.dtype() != theirs.dtype() {
        return false;
    }
    match (reals(ours), reals(theirs)) {
        (Some(ours), Some(theirs)) => ours.iter().zip(&theirs).all(|(x, y)| {
            x == y || x.is_nan() && y.is_nan() || (x - y).abs() <= TOLERANCE * y.abs().max(1.0)
        }),
        _ => ours == theirs,
    }
}

#[test]
fn operations_give_tensorflows_values() {
    let mut faults = Vec::new();
    for (i, (node, inputs, case)) in cases().into_iter().enumerate() {
        let shown = format!("case {i}: {} of {inputs:?}", node.op);
        match (case["outputs"].as_array(), case["error"].as_i64()) {
            (Some(outputs), _) => match run(&node, inputs, outputs.len()) {
                Err(error) => faults.push(format!("{shown}: {error}")),
                Ok(ours) => {
                    let theirs: Vec<Tensor> = outputs.iter().map(read).collect();
                    let equal = ours.len() == theirs.len()
                        && ours.iter().zip(&theirs).all(|(a, b)| close(a, b));
                    if !equal {
                        faults
                            .push(format!("{shown}:\n  ours {ours:?}\n  TensorFlow's {theirs:?}"));
                    }
                }
            },
            (None, code) => match run(&node, inputs, 1) {
                Err(error) if Some(error.code as i64) == code => {}
                other => faults.push(format!("{shown}: {other:?} instead of error {code:?}")),
            },
        }
    }
    assert!(faults.is_empty(), "{} faults\n{}", faults.len(), faults.join("\n"));
}

/// Whatever a client hands an operation, it answers or refuses.
#[test]
fn operands_of_other_operations_are_computed_or_refused() {
    let cases = cases();
    let pool: Vec<Tensor> = cases.iter().flat_map(|case| case.1.clone()).collect();
    let mut state = 1u64;
    let mut next = |below: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    let mut computed = 0;
    for (node, inputs, _) in &cases {
        for _ in 0..40 {
            let mut inputs = inputs.clone();
            match next(8) {
                0 => drop(inputs.pop()),
                _ if inputs.is_empty() => inputs.push(pool[next(pool.len())].clone()),
                _ => {
                    let at = next(inputs.len());
                    inputs[at] = pool[next(pool.len())].clone();
                }
            }
            let mut node = node.clone();
            if next(4) == 0 && !node.attr.is_empty() {
                // An attribute of another node, or none.
                let at = next(node.attr.len());
                let name = node.attr.keys().nth(at).unwrap().clone();
                let other = &cases[next(cases.len())].0.attr;
                match other.values().nth(next(other.len().max(1))) {
                    Some(attr) => drop(node.attr.insert(name, attr.clone())),
                    None => drop(node.attr.remove(&name)),
                }
            }
            computed += usize::from(run(&node, inputs, 3).is_ok());
        }
    }
    assert!(computed > 1000, "{computed}");
}

/// A few bytes must not ask for the memory of the machine.
#[test]
fn enormous_wishes_are_refused() {
    let task = Task::default();
    let vector = |values: &[i64]| Value::Tensor(Tensor::vector(values.to_vec()).unwrap());
    let texts = Value::Tensor(Tensor::full([1 << 16], Bytes::from(vec![b'x'; 1 << 16])).unwrap());
    let empty = Value::Tensor(Tensor::new([1 << 28, 0], Vec::<f32>::new()).unwrap());
    let one = scalar(1f32);
    let huge = vector(&[1 << 40]);
    let types = list(proto::attr_value::ListValue { r#type: vec![1], ..Default::default() });
    let queue = task.one("FIFOQueueV2", &[("component_types", types)], &[]);
    let wishes: [(&str, Vec<Value>); 9] = [
        ("Fill", vec![huge.clone(), one.clone()]),
        ("BroadcastTo", vec![one.clone(), huge.clone()]),
        ("Tile", vec![floats(&[1.0]), huge.clone()]),
        ("Range", vec![scalar(0i64), scalar(i64::MAX), scalar(1i64)]),
        ("OneHot", vec![scalar(0i64), scalar(i64::MAX), one.clone(), one.clone()]),
        ("StringJoin", vec![texts.clone(), texts.clone()]),
        ("Unpack", vec![empty.clone()]),
        ("QueueEnqueueManyV2", vec![queue, empty.clone()]),
        ("RandomShuffle", vec![Value::Tensor(Tensor::zeros(DType::U8, [1 << 23]).unwrap())]),
    ];
    for (op, inputs) in wishes {
        let error = task.run(op, &[("num", Attr::I(1 << 28))], &inputs).err().unwrap();
        assert_eq!(error.code, Code::ResourceExhausted, "{op}: {error}");
    }
    // Nothing, many times over, is nothing.
    let tiled = task.one("Tile", &[], &[empty, vector(&[1, 1 << 40])]);
    assert_eq!(**tiled.tensor().unwrap().shape(), [1 << 28, 0]);
}

type Attrs<'a> = &'a [(&'a str, Attr)];

fn node(op: &str, attrs: Attrs<'_>) -> proto::NodeDef {
    let attr = attrs
        .iter()
        .map(|(name, value)| ((*name).to_owned(), proto::AttrValue { value: Some(value.clone()) }));
    proto::NodeDef {
        name: op.to_lowercase(),
        op: op.to_owned(),
        attr: attr.collect(),
        ..Default::default()
    }
}

/// A task and a step on it.
#[derive(Default)]
struct Task {
    resources: Resources,
    cancellation: Cancellation,
}

impl Task {
    fn run(&self, op: &str, attrs: Attrs<'_>, inputs: &[Value]) -> Result<Vec<Value>, OpError> {
        let inputs = inputs.iter().cloned().map(Some).collect();
        step(&self.resources, &self.cancellation, &node(op, attrs), inputs, 3)
    }

    fn one(&self, op: &str, attrs: Attrs<'_>, inputs: &[Value]) -> Value {
        self.run(op, attrs, inputs).unwrap().remove(0)
    }
}

fn floats(values: &[f32]) -> Value {
    Value::Tensor(Tensor::vector(values.to_vec()).unwrap())
}

fn scalar<T: tftrain::session::Element>(value: T) -> Value {
    Value::Tensor(Tensor::scalar(value))
}

fn text(text: &'static str) -> Attr {
    Attr::S(Bytes::from_static(text.as_bytes()))
}

const T: (&str, Attr) = ("T", Attr::Type(1));
const DTYPE: (&str, Attr) = ("dtype", Attr::Type(1));

#[test]
fn references_alias_and_resources_do_not() {
    let task = Task::default();
    let shared = ("shared_name", text("w"));
    let by_ref = task.one("VariableV2", &[DTYPE, shared.clone()], &[]);
    let owned = task.one("VarHandleOp", &[DTYPE, shared], &[]);
    let ready = |op: &str, value: &Value| {
        task.one(op, &[], std::slice::from_ref(value)).tensor().unwrap().item::<bool>().unwrap()
    };
    assert!(!ready("IsVariableInitialized", &by_ref) && !ready("VarIsInitializedOp", &owned));
    let error = task.run("Identity", &[], std::slice::from_ref(&by_ref)).err().unwrap();
    assert_eq!(error.message, "Attempting to use uninitialized value variablev2");
    let error = task.run("ReadVariableOp", &[DTYPE], std::slice::from_ref(&owned)).err().unwrap();
    assert!(error.message.starts_with("Could not find variable w. This could mean"), "{error}");
    assert!(error.message.contains("container=ps, status error message=Resource ps/w/"), "{error}");

    task.run("Assign", &[T], &[by_ref.clone(), floats(&[1.0, 2.0])]).unwrap();
    assert!(ready("IsVariableInitialized", &by_ref) && !ready("VarIsInitializedOp", &owned));
    let alias = task.one("Identity", &[], std::slice::from_ref(&by_ref));
    let copy = task.one("Snapshot", &[], std::slice::from_ref(&by_ref));
    task.run("AssignAdd", &[T], &[by_ref.clone(), floats(&[10.0, 20.0])]).unwrap();
    assert_eq!(alias.tensor().unwrap().slice::<f32>().unwrap(), [11.0, 22.0]);
    assert_eq!(copy.tensor().unwrap().slice::<f32>().unwrap(), [1.0, 2.0]);
    let error = task.run("Assign", &[T], &[by_ref.clone(), floats(&[1.0])]).err().unwrap();
    assert!(error.message.ends_with("lhs shape= [2] rhs shape= [1]"), "{error}");
    let error = task.run("AssignSub", &[T], &[by_ref, floats(&[1.0])]).err().unwrap();
    assert!(error.message.contains("shapes must be equal"), "{error}");

    task.run("AssignVariableOp", &[DTYPE], &[owned.clone(), floats(&[3.0])]).unwrap();
    let before = task.one("ReadVariableOp", &[DTYPE], std::slice::from_ref(&owned));
    task.run("AssignSubVariableOp", &[DTYPE], &[owned.clone(), floats(&[1.0])]).unwrap();
    let after = task.one("ReadVariableOp", &[DTYPE], std::slice::from_ref(&owned));
    assert_eq!(before.tensor().unwrap().slice::<f32>().unwrap(), [3.0]);
    assert_eq!(after.tensor().unwrap().slice::<f32>().unwrap(), [2.0]);
    task.run("DestroyResourceOp", &[], &[owned]).unwrap();
    let again = task.one("VarHandleOp", &[DTYPE, ("shared_name", text("w"))], &[]);
    assert!(!ready("VarIsInitializedOp", &again));
}

/// Expected values by hand: two steps of each rule with the gradient 1, of a variable that begins at 1.
#[test]
fn optimizers_update_by_their_rules() {
    let rules: [(&str, usize, &[f32], usize, f32); 5] = [
        ("ApplyGradientDescent", 0, &[0.5], 1, 0.0),
        ("ApplyMomentum", 1, &[0.5, -1.0, 0.9], 1, -0.45),
        ("ApplyAdagrad", 1, &[0.5], 1, 1.0 - 0.5 - 0.5 / 2f32.sqrt()),
        ("ApplyAdam", 2, &[0.9, 0.999, 0.5, 0.9, 0.999, 0.0], 6, 0.0),
        ("ApplyRMSProp", 2, &[0.5, 0.0, 0.0, 0.0], 4, 0.0),
    ];
    for (rule, slots, numbers, gradient, expected) in rules {
        for prefix in ["", "Resource"] {
            let task = Task::default();
            let make = |i: usize| {
                let name = ["x", "slot1", "slot2"][i];
                let kind = if prefix.is_empty() { "VariableV2" } else { "VarHandleOp" };
                let variable = task.one(kind, &[DTYPE, ("shared_name", text(name))], &[]);
                let value = floats(&[if i == 0 { 1.0 } else { 0.0 }]);
                let assign = if prefix.is_empty() { "Assign" } else { "AssignVariableOp" };
                task.run(assign, &[T, DTYPE], &[variable.clone(), value]).unwrap();
                variable
            };
            let mut inputs: Vec<Value> = (0..=slots).map(make).collect();
            let variables = inputs.clone();
            // Where momentum takes its gradient between its numbers, it stands as -1 here.
            inputs.extend(
                numbers.iter().map(|&n| if n == -1.0 { floats(&[1.0]) } else { scalar(n) }),
            );
            if !numbers.contains(&-1.0) {
                inputs.insert(1 + slots + gradient, floats(&[1.0]));
            }
            let op = format!("{prefix}{rule}");
            task.run(&op, &[T], &inputs).unwrap();
            if rule == "ApplyAdam" {
                inputs[3] = scalar(0.81f32);
                inputs[4] = scalar(0.999f32 * 0.999);
            }
            task.run(&op, &[T], &inputs).unwrap();
            let read = match prefix {
                "" => variables[0].tensor().unwrap(),
                _ => task.one("ReadVariableOp", &[DTYPE], &variables[..1]).tensor().unwrap(),
            };
            let found = read.slice::<f32>().unwrap()[0];
            assert!((found - expected).abs() < 1e-4, "{op}: {found} instead of {expected}");
            if slots > 0 {
                inputs[1] = inputs[0].clone();
                let error = task.run(&op, &[T], &inputs).err().unwrap();
                assert!(error.message.contains("must be different variables"), "{error}");
            }
        }
    }
}

fn list(list: proto::attr_value::ListValue) -> Attr {
    Attr::List(list)
}

#[test]
fn queues_hand_on_in_order_and_wait() {
    let task = Task::default();
    let types = list(proto::attr_value::ListValue { r#type: vec![3], ..Default::default() });
    let queue =
        task.one("FIFOQueueV2", &[("component_types", types), ("capacity", Attr::I(3))], &[]);
    let many = Value::Tensor(Tensor::vector(vec![1, 2]).unwrap());
    task.run("QueueEnqueueManyV2", &[], &[queue.clone(), many.clone()]).unwrap();
    task.run("QueueEnqueueV2", &[], &[queue.clone(), scalar(3)]).unwrap();
    let error = task.run("QueueEnqueueV2", &[], &[queue.clone(), scalar(3f32)]).err().unwrap();
    assert!(error.message.contains("holds tuples of"), "{error}");
    let size = |queue: &Value| {
        task.one("QueueSizeV2", &[], std::slice::from_ref(queue))
            .tensor()
            .unwrap()
            .item::<i32>()
            .unwrap()
    };
    assert_eq!(size(&queue), 3);
    std::thread::scope(|scope| {
        // The fourth waits until the first is taken.
        let waiting =
            scope.spawn(|| task.run("QueueEnqueueV2", &[], &[queue.clone(), scalar(4)]).map(drop));
        let first = task.one("QueueDequeueV2", &[], std::slice::from_ref(&queue));
        assert_eq!(first.tensor().unwrap().item::<i32>().unwrap(), 1);
        waiting.join().unwrap().unwrap();
    });
    let rest = task.one("QueueDequeueManyV2", &[], &[queue.clone(), scalar(3)]);
    assert_eq!(rest.tensor().unwrap().slice::<i32>().unwrap(), [2, 3, 4]);
    task.run("QueueCloseV2", &[], std::slice::from_ref(&queue)).unwrap();
    let error = task.run("QueueDequeueV2", &[], std::slice::from_ref(&queue)).err().unwrap();
    assert_eq!(error.code, Code::OutOfRange);
    assert!(
        error
            .message
            .contains("is closed and has insufficient elements (requested 1, current size 0)"),
        "{error}"
    );
    let error = task.run("QueueEnqueueManyV2", &[], &[queue, many]).err().unwrap();
    assert_eq!(error.code, Code::Cancelled);
}

#[test]
fn accumulators_mean_what_is_not_stale_and_waiting_ends_with_the_step() {
    let task = Task::default();
    let accumulator = task.one("ResourceConditionalAccumulator", &[DTYPE], &[]);
    let give = |step: i64, value: f32| {
        task.run(
            "ResourceAccumulatorApplyGradient",
            &[DTYPE],
            &[accumulator.clone(), scalar(step), floats(&[value])],
        )
        .unwrap();
    };
    let count = || {
        let count =
            task.one("ResourceAccumulatorNumAccumulated", &[], std::slice::from_ref(&accumulator));
        count.tensor().unwrap().item::<i32>().unwrap()
    };
    task.run("ResourceAccumulatorSetGlobalStep", &[], &[accumulator.clone(), scalar(5i64)])
        .unwrap();
    give(4, 100.0);
    assert_eq!(count(), 0, "stale gradients are dropped");
    give(5, 1.0);
    give(6, 2.0);
    give(5, 6.0);
    let mean =
        task.one("ResourceAccumulatorTakeGradient", &[DTYPE], &[accumulator.clone(), scalar(2)]);
    assert_eq!(mean.tensor().unwrap().slice::<f32>().unwrap(), [3.0]);
    give(5, 1.0);
    assert_eq!(count(), 0, "taking moved the step on");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            task.run("ResourceAccumulatorTakeGradient", &[DTYPE], &[accumulator.clone(), scalar(1)])
                .err()
        });
        task.cancellation.cancel(OpError::cancelled("enough"));
        assert_eq!(waiting.join().unwrap().unwrap().message, "enough");
    });
}

#[test]
fn checkpoints_are_saved_merged_and_restored() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| Bytes::from(dir.path().join(name).to_str().unwrap().to_owned());
    let strings = |texts: &[&'static str]| {
        Value::Tensor(
            Tensor::vector(texts.iter().map(|t| Bytes::from_static(t.as_bytes())).collect())
                .unwrap(),
        )
    };
    let task = Task::default();
    let save = |prefix: &str, name: &'static str, value: Value| {
        task.run("SaveV2", &[], &[scalar(path(prefix)), strings(&[name]), strings(&[""]), value])
    };
    save("tmp/part-0", "b", floats(&[1.0, 2.0])).unwrap();
    save("tmp/part-1", "a", strings(&["x", ""])).unwrap();
    let parts = Tensor::vector(vec![path("tmp/part-0"), path("tmp/part-1")]).unwrap();
    task.run("MergeV2Checkpoints", &[], &[Value::Tensor(parts), scalar(path("model"))]).unwrap();
    assert!(!dir.path().join("tmp").exists());
    let dtypes = |types: Vec<i32>| {
        ("dtypes", list(proto::attr_value::ListValue { r#type: types, ..Default::default() }))
    };
    let restore = |names: &[&'static str], types: Vec<i32>, prefix: &str| {
        let slices = vec![""; names.len()];
        let inputs = [scalar(path(prefix)), strings(names), strings(&slices)];
        task.run("RestoreV2", &[dtypes(types)], &inputs)
    };
    let back = restore(&["b", "a"], vec![1, 7], "model").unwrap();
    assert_eq!(back[0].tensor().unwrap().slice::<f32>().unwrap(), [1.0, 2.0]);
    assert_eq!(back[1].tensor().unwrap().slice::<Bytes>().unwrap(), ["x", ""]);
    let error = restore(&["c"], vec![1], "model").err().unwrap();
    assert_eq!((error.code, &*error.message), (Code::NotFound, "Key c not found in checkpoint"));
    let error = restore(&["b"], vec![1], "none").err().unwrap();
    assert!(
        error.code == Code::NotFound && error.message.starts_with("Unsuccessful TensorSliceReader"),
        "{error}"
    );
    assert_eq!(restore(&["b"], vec![3], "model").err().unwrap().code, Code::InvalidArgument);
    std::fs::write(dir.path().join("model.index"), "cut").unwrap();
    assert_eq!(restore(&["b"], vec![1], "model").err().unwrap().code, Code::DataLoss);
}
