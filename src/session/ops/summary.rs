//! Summaries for TensorBoard, as serialized messages that the client writes into its event file.

use std::collections::HashSet;

use bytes::Bytes;
use prost::Message;

use super::broadcast::text;
use super::elementwise::converted;
use super::{Kernel, OpDef};
use crate::io::event::Histogram;
use crate::io::event::proto::{HistogramProto, Summary, SummaryValue, Value};
use crate::session::{DType, Node, OpError, Tensor};

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("ScalarSummary", scalar),
    OpDef::new("HistogramSummary", histogram),
    OpDef::new("MergeSummary", merge),
];

fn serialized(values: Vec<SummaryValue>) -> Tensor {
    Tensor::scalar(Bytes::from(Summary { value: values }.encode_to_vec()))
}

fn tag(bytes: &Bytes) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn scalar(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (tags, values) = (call.tensor(0)?, call.tensor(1)?);
        let names = tags.slice::<Bytes>()?;
        if tags.shape() != values.shape() && !(tags.len() == 1 && values.len() == 1) {
            let first = if names.len() == 1 {
                format!(" (tag '{}')", tag(&names[0]))
            } else {
                String::new()
            };
            return Err(OpError::invalid(format!(
                "tags and values are not the same shape: {} != {}{first}",
                text(tags.shape()),
                text(values.shape())
            )));
        }
        let values = converted(&values, DType::F32)?;
        let pairs = names.iter().zip(values.slice::<f32>()?);
        let rows = pairs.map(|(name, value)| SummaryValue {
            tag: tag(name),
            value: Some(Value::Simple(*value)),
        });
        let out = serialized(rows.collect());
        call.set(0, out);
        Ok(())
    }))
}

fn histogram(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let name = tag(&call.tensor(0)?.item::<Bytes>()?);
        let values = converted(&call.tensor(1)?, DType::F32)?;
        let values = values.slice::<f32>()?;
        if let Some(bad) = values.iter().find(|value| !value.is_finite()) {
            let kind = if bad.is_nan() { "Nan" } else { "Infinity" };
            return Err(OpError::invalid(format!("{kind} in summary histogram for: {name}")));
        }
        let h = Histogram::of(values);
        let (bucket_limit, bucket) = h.buckets.into_iter().unzip();
        let Histogram { min, max, num, sum, sum_squares, .. } = h;
        let proto = HistogramProto { min, max, num, sum, sum_squares, bucket_limit, bucket };
        let out = serialized(vec![SummaryValue { tag: name, value: Some(Value::Histo(proto)) }]);
        call.set(0, out);
        Ok(())
    }))
}

fn merge(_: &Node<'_>) -> Result<Kernel, OpError> {
    Ok(Kernel::new(|call| {
        let (mut all, mut tags) = (Vec::new(), HashSet::new());
        for i in 0..call.inputs() {
            for bytes in call.tensor(i)?.slice::<Bytes>()? {
                let summary = Summary::decode(bytes.clone()).map_err(|error| {
                    OpError::invalid(format!("Could not parse one of the summary inputs: {error}"))
                })?;
                for value in summary.value {
                    if !value.tag.is_empty() && !tags.insert(value.tag.clone()) {
                        let tag = value.tag;
                        return Err(OpError::invalid(format!(
                            "Duplicate tag {tag} found in summary inputs"
                        )));
                    }
                }
                // Messages of one type, written one after the other, are their union.
                all.extend_from_slice(bytes);
            }
        }
        call.set(0, Tensor::scalar(Bytes::from(all)));
        Ok(())
    }))
}
