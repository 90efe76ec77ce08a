//! Values on the command line and in NumPy files, as tensors of a session and back.

use std::path::Path;

use anyhow::{Context, Result};
use bytes::Bytes;
use ndarray::{ArrayD, ArrayViewD, IxDyn};
use ndarray_npy::{ViewNpyError, ViewNpyExt, write_npy};
use serde_json::Value as Json;

use super::exit::Usage;
use crate::session::proto::GraphDef;
use crate::session::{DType, Data, Input, Node, Tensor};

/// `NAME=VALUE` as the name and the tensor: a number, a text, nested lists of them in brackets, or `@FILE.npy`. Its type is that of
/// the node that it replaces; where the node does not say, whole numbers are int32 and others float.
pub(super) fn feed(text: &str, graph: &GraphDef) -> Result<(String, Tensor)> {
    let usage = |words: &str| Usage(format!("--feed {text}: {words}"));
    let (name, value) = text.split_once('=').ok_or_else(|| usage("write it NAME=VALUE"))?;
    let wanted = type_of(graph, name).map_err(|words| usage(&words))?;
    let tensor = match value.strip_prefix('@') {
        Some(path) => from_file(Path::new(path), wanted)?,
        None => from_literal(value, wanted).map_err(|words| usage(&words))?,
    };
    Ok((name.to_owned(), tensor))
}

/// The type of a node's output, as far as its attributes tell.
fn type_of(graph: &GraphDef, name: &str) -> Result<Option<DType>, String> {
    let input = Input::parse(name);
    let Some(node) = graph.node.iter().find(|node| node.name == input.node) else {
        let names = graph.node.iter().map(|node| &*node.name);
        let near = names
            .max_by(|a, b| strsim::jaro(a, input.node).total_cmp(&strsim::jaro(b, input.node)));
        return Err(format!(
            "the graph has no node {}; the nearest is {}",
            input.node,
            near.unwrap_or_default()
        ));
    };
    let node = Node::new(node);
    let attributes = ["dtype", "DstT", "T"].into_iter();
    Ok(attributes.filter(|key| node.attr(key).is_some()).find_map(|key| node.dtype(key).ok()))
}

/// All values of a nested list, row-major, with its extents.
fn flatten(value: Json) -> Result<(Vec<usize>, Vec<Json>), String> {
    let Json::Array(rows) = value else { return Ok((vec![], vec![value])) };
    let (mut extents, mut values) = (vec![rows.len()], Vec::new());
    for (i, row) in rows.into_iter().enumerate() {
        let (inner, flat) = flatten(row)?;
        if i == 0 {
            extents.extend(&inner);
        } else if extents[1..] != inner {
            return Err("the rows of a list differ in length".to_owned());
        }
        values.extend(flat);
    }
    Ok((extents, values))
}

fn from_literal(text: &str, wanted: Option<DType>) -> Result<Tensor, String> {
    let json = match serde_json::from_str(text) {
        // A bare word is a text.
        Err(_) if !text.starts_with(['[', '"', '{']) => Json::String(text.to_owned()),
        other => other.map_err(|error| format!("{error}; lists are written [[1, 2], [3, 4]]"))?,
    };
    let (extents, values) = flatten(json)?;
    let dtype = wanted.unwrap_or(match values.first() {
        Some(Json::Bool(_)) => DType::Bool,
        Some(Json::String(_)) => DType::Str,
        _ if values.iter().all(Json::is_i64) && !values.is_empty() => DType::I32,
        _ => DType::F32,
    });
    fn all<T: crate::session::Element>(
        extents: Vec<usize>,
        values: &[Json],
        read: impl Fn(&Json) -> Option<T>,
    ) -> Result<Tensor, String> {
        let parsed = values
            .iter()
            .map(|value| read(value).ok_or_else(|| format!("{value} is no {}", T::DTYPE)));
        let parsed: Vec<T> = parsed.collect::<Result<_, _>>()?;
        Tensor::new(extents, parsed).map_err(|error| error.message)
    }
    match dtype {
        DType::F32 => all(extents, &values, |v| number(v).map(|v| v as f32)),
        DType::F64 => all(extents, &values, number),
        DType::I32 => all(extents, &values, |v| i32::try_from(v.as_i64()?).ok()),
        DType::I64 => all(extents, &values, Json::as_i64),
        DType::U8 => all(extents, &values, |v| u8::try_from(v.as_u64()?).ok()),
        DType::Bool => all(extents, &values, Json::as_bool),
        DType::Str => all(extents, &values, |v| match v {
            Json::String(text) => Some(Bytes::from(text.clone())),
            // What looks like a number is one only where numbers are wanted.
            Json::Number(_) | Json::Bool(_) => Some(Bytes::from(v.to_string())),
            _ => None,
        }),
    }
}

/// A number; JSON has no word for those beyond the finite ones.
fn number(value: &Json) -> Option<f64> {
    match value {
        Json::String(text) if ["nan", "inf", "-inf"].contains(&&*text.to_lowercase()) => {
            text.parse().ok()
        }
        other => other.as_f64(),
    }
}

/// Reads a NumPy file of any plain type, and converts its numbers as NumPy would.
fn from_file(path: &Path, wanted: Option<DType>) -> Result<Tensor> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let mut reason = String::new();
    macro_rules! attempt {
        ($($file:ty),*) => {$(
            match ArrayViewD::<$file>::view_npy(&bytes) {
                Ok(array) => return Ok(converted(path, &array, wanted)?),
                Err(ViewNpyError::WrongDescriptor(_)) => {}
                Err(error) => reason = error.to_string(),
            }
        )*};
    }
    attempt!(f32, f64, i32, i64, u8, bool, i8, i16, u16, u32, u64);
    if reason.is_empty() {
        reason = "its elements are neither plain numbers nor truth values".to_owned();
    }
    Err(Usage(format!("{} cannot be fed: {reason}", path.display())).into())
}

/// A number in a NumPy file.
trait Number: Copy {
    /// Its own type, where sessions have it.
    const DTYPE: DType;
    fn float(self) -> f64;
    fn whole(self) -> Option<i64>;
}

macro_rules! numbers {
    ($($file:ty => $dtype:ident, $float:expr, $whole:expr;)*) => {$(
        impl Number for $file {
            const DTYPE: DType = DType::$dtype;
            fn float(self) -> f64 { $float(self) }
            fn whole(self) -> Option<i64> { $whole(self) }
        }
    )*};
}

/// A float that is a whole number.
fn exact(value: f64) -> Option<i64> {
    let whole = value as i64;
    if whole as f64 == value { Some(whole) } else { None }
}

numbers! {
    f32 => F32, f64::from, |v| exact(f64::from(v));
    f64 => F64, |v| v, exact;
    i8 => I32, f64::from, |v| Some(i64::from(v));
    i16 => I32, f64::from, |v| Some(i64::from(v));
    i32 => I32, f64::from, |v| Some(i64::from(v));
    i64 => I64, |v| v as f64, Some;
    u8 => U8, f64::from, |v| Some(i64::from(v));
    u16 => I32, f64::from, |v| Some(i64::from(v));
    u32 => I64, f64::from, |v| Some(i64::from(v));
    u64 => I64, |v| v as f64, |v: u64| v.try_into().ok();
    bool => Bool, |v| f64::from(u8::from(v)), |v| Some(i64::from(v));
}

fn converted<T: Number>(
    path: &Path,
    array: &ArrayViewD<'_, T>,
    wanted: Option<DType>,
) -> Result<Tensor, Usage> {
    let fail = |words: String| Usage(format!("{}: {words}", path.display()));
    let dtype = wanted.unwrap_or(T::DTYPE);
    let values = || array.iter().copied();
    let shape = array.shape().to_vec();
    let whole =
        |value: T| value.whole().ok_or_else(|| fail(format!("{} is no {dtype}", value.float())));
    macro_rules! integers {
        ($to:ty) => {{
            let narrow = |value: i64| {
                <$to>::try_from(value).map_err(|_| fail(format!("{value} is no {dtype}")))
            };
            let all = values().map(|value| whole(value).and_then(narrow));
            Tensor::new(shape, all.collect::<Result<Vec<$to>, _>>()?)
        }};
    }
    let tensor = match dtype {
        DType::F32 => Tensor::new(shape, values().map(|v| v.float() as f32).collect()),
        DType::F64 => Tensor::new(shape, values().map(Number::float).collect()),
        DType::I32 => integers!(i32),
        DType::I64 => integers!(i64),
        DType::U8 => integers!(u8),
        DType::Bool => Tensor::new(shape, values().map(|v| v.float() != 0.0).collect()),
        DType::Str => return Err(fail("the graph wants strings there".to_owned())),
    };
    tensor.map_err(|error| fail(error.message))
}

fn array<T: Clone>(tensor: &Tensor, values: &[T]) -> Result<ArrayD<T>> {
    Ok(ArrayD::from_shape_vec(IxDyn(tensor.shape()), values.to_vec())?)
}

/// A tensor as NumPy prints it.
pub(super) fn shown(tensor: &Tensor) -> Result<String> {
    Ok(match tensor.data() {
        Data::F32(values) => array(tensor, values)?.to_string(),
        Data::F64(values) => array(tensor, values)?.to_string(),
        Data::I32(values) => array(tensor, values)?.to_string(),
        Data::I64(values) => array(tensor, values)?.to_string(),
        Data::U8(values) => array(tensor, values)?.to_string(),
        Data::Bool(values) => array(tensor, values)?.to_string(),
        Data::Str(values) => {
            let quoted: Vec<String> =
                values.iter().map(|text| format!("b\"{}\"", text.escape_ascii())).collect();
            array(tensor, &quoted)?.to_string()
        }
    })
}

/// Writes a tensor as a NumPy file.
pub(super) fn write(path: &Path, tensor: &Tensor) -> Result<()> {
    let written = match tensor.data() {
        Data::F32(values) => write_npy(path, &array(tensor, values)?),
        Data::F64(values) => write_npy(path, &array(tensor, values)?),
        Data::I32(values) => write_npy(path, &array(tensor, values)?),
        Data::I64(values) => write_npy(path, &array(tensor, values)?),
        Data::U8(values) => write_npy(path, &array(tensor, values)?),
        Data::Bool(values) => write_npy(path, &array(tensor, values)?),
        Data::Str(_) => {
            let words = format!("{}: NumPy's files hold no strings", path.display());
            return Err(Usage(words).into());
        }
    };
    written.with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::session::proto::{AttrValue, NodeDef, attr_value::Value};

    fn graph(dtype: DType) -> GraphDef {
        let attr = AttrValue { value: Some(Value::Type(dtype.wire())) };
        let node = NodeDef {
            name: "x".to_owned(),
            op: "Placeholder".to_owned(),
            attr: [("dtype".to_owned(), attr)].into(),
            ..NodeDef::default()
        };
        GraphDef { node: vec![node], ..GraphDef::default() }
    }

    fn fed(text: &str, dtype: DType) -> Result<Tensor> {
        feed(text, &graph(dtype)).map(|(_, tensor)| tensor)
    }

    #[test]
    fn literals_take_the_type_of_the_node() {
        let two = Tensor::new([2, 2], vec![1f32, 2.0, 3.0, -4.5]).unwrap();
        assert_eq!(fed("x:0=[[1, 2], [3, -4.5]]", DType::F32).unwrap(), two);
        assert_eq!(fed("x=7", DType::F64).unwrap(), Tensor::scalar(7f64));
        assert_eq!(fed("x=7", DType::Str).unwrap(), Tensor::scalar(Bytes::from("7")));
        assert_eq!(fed("x=model.ckpt", DType::Str).unwrap().shape().len(), 0);
        assert_eq!(fed("x=[]", DType::I64).unwrap().len(), 0);
        assert_eq!(fed("x=true", DType::Bool).unwrap(), Tensor::scalar(true));
        assert!(fed("x=nan", DType::F32).unwrap().item::<f32>().unwrap().is_nan());
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let error = |text: &str, dtype| fed(text, dtype).unwrap_err().to_string();
        assert!(error("x=1.5", DType::I32).contains("1.5 is no int32"));
        assert!(error("x=[[1], [2, 3]]", DType::I32).contains("differ in length"));
        assert!(error("x=[1", DType::I32).contains("EOF"));
        assert!(error("x", DType::I32).contains("NAME=VALUE"));
        assert!(error("y=1", DType::I32).contains("the nearest is x"));
        assert!(error("x=@/nowhere.npy", DType::I32).contains("/nowhere.npy"));
    }

    #[test]
    fn files_are_converted_as_numpy_does() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.npy");
        let doubles = Tensor::new([2], vec![1.0f64, 300.0]).unwrap();
        write(&path, &doubles).unwrap();
        let text = format!("x=@{}", path.display());
        assert_eq!(fed(&text, DType::F64).unwrap(), doubles);
        assert_eq!(fed(&text, DType::F32).unwrap(), Tensor::new([2], vec![1f32, 300.0]).unwrap());
        assert_eq!(fed(&text, DType::I64).unwrap(), Tensor::new([2], vec![1i64, 300]).unwrap());
        assert!(fed(&text, DType::U8).unwrap_err().to_string().contains("300 is no uint8"));
        let mut bytes = std::fs::read(&path).unwrap();
        bytes.truncate(bytes.len() - 3);
        std::fs::write(&path, &bytes).unwrap();
        assert!(fed(&text, DType::F64).unwrap_err().to_string().contains("a.npy"));
        std::fs::write(&path, b"hello").unwrap();
        assert!(fed(&text, DType::F64).unwrap_err().to_string().contains("a.npy"));
    }

    #[test]
    fn tensors_are_shown_as_lists() {
        let tensor = Tensor::new([2, 1], vec![1.5f32, 2.0]).unwrap();
        assert_eq!(shown(&tensor).unwrap(), "[[1.5],\n [2]]");
        let text = Tensor::scalar(Bytes::from("Hello\n"));
        assert_eq!(shown(&text).unwrap(), "b\"Hello\\n\"");
    }
}
