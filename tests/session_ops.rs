//! The operations of sessions against TensorFlow's values (`tests/interop/session_ops.py` wrote them).

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use bytes::Bytes;
use prost::Message;
use serde_json::Value as Json;
use tftrain::session::{
    Call, Cancellation, Context, DType, Data, Node, OpError, Resources, Tensor, Value, ops, proto,
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

fn run(node: &proto::NodeDef, inputs: Vec<Tensor>, outputs: usize) -> Result<Vec<Tensor>, OpError> {
    let op = ops::find(&node.op).unwrap_or_else(|| panic!("{} is not there", node.op));
    let kernel = (op.build)(&Node::new(node))?;
    let (resources, cancellation) = (Resources::default(), Cancellation::default());
    let context = Context { resources: &resources, cancellation: &cancellation, job: "worker" };
    let mut inputs: Vec<_> = inputs.into_iter().map(|tensor| Some(Value::Tensor(tensor))).collect();
    let mut results = vec![None; outputs];
    (kernel.run)(&mut Call::new(&context, &mut inputs, &mut results))?;
    results.into_iter().map(|value| value.expect("every output is set").tensor()).collect()
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
    let cases: Json = serde_json::from_str(include_str!("golden/session_ops.json")).unwrap();
    let mut faults = Vec::new();
    for (i, case) in cases.as_array().unwrap().iter().enumerate() {
        let hex = case["node"].as_str().unwrap();
        let bytes: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect();
        let node = proto::NodeDef::decode(bytes.as_slice()).unwrap();
        let inputs: Vec<Tensor> = case["inputs"].as_array().unwrap().iter().map(read).collect();
        let shown = format!("case {i}: {} of {inputs:?}", node.op);
        match (case["outputs"].as_array(), case["error"].as_i64()) {
            (Some(outputs), _) => match run(&node, inputs, outputs.len()) {
                Err(error) => faults.push(format!("{shown}: {error}")),
                Ok(ours) => {
                    let theirs: Vec<Tensor> = outputs.iter().map(read).collect();
                    if !ours.iter().zip(&theirs).all(|(a, b)| close(a, b)) {
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
