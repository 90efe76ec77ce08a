//! [`Node`]: a node of a graph, with its attributes read by type.

use super::codec;
use super::proto::attr_value::{ListValue, Value as Attr};
use super::proto::{NodeDef, TensorShapeProto};
use super::{DType, OpError, Tensor};

/// An edge into a node: `name:index`, or `^name` for control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Input<'a> {
    /// The node it comes from.
    pub node: &'a str,
    /// Which of its outputs; `None` for a control edge.
    pub output: Option<usize>,
}

impl<'a> Input<'a> {
    /// Reads an edge, or the name of a tensor that is fed or fetched.
    pub fn parse(text: &'a str) -> Self {
        if let Some(node) = text.strip_prefix('^') {
            return Self { node, output: None };
        }
        match text.rsplit_once(':').map(|(node, output)| (node, output.parse())) {
            Some((node, Ok(output))) => Self { node, output: Some(output) },
            _ => Self { node: text, output: Some(0) },
        }
    }
}

/// A node as a kernel is built from it. Attributes that are missing have the default that the caller gives: another
/// program's graph may leave out those that have their default.
#[derive(Clone, Copy, Debug)]
pub struct Node<'a> {
    def: &'a NodeDef,
}

impl<'a> Node<'a> {
    /// Around a definition.
    pub fn new(def: &'a NodeDef) -> Self {
        Self { def }
    }

    /// The name.
    pub fn name(&self) -> &'a str {
        &self.def.name
    }

    /// The operation.
    pub fn op(&self) -> &'a str {
        &self.def.op
    }

    /// The definition.
    pub fn def(&self) -> &'a NodeDef {
        self.def
    }

    /// The number of inputs that are tensors.
    pub fn inputs(&self) -> usize {
        self.def.input.iter().filter(|input| !input.starts_with('^')).count()
    }

    /// An attribute as it stands.
    pub fn attr(&self, name: &str) -> Option<&'a Attr> {
        self.def.attr.get(name).and_then(|attr| attr.value.as_ref())
    }

    /// For an attribute that is missing or of another kind.
    pub fn wrong(&self, name: &str) -> OpError {
        OpError::invalid(format!(
            "NodeDef missing attr '{name}' from Op<name={}>; or its value is of another kind",
            self.def.op
        ))
    }

    /// A whole number.
    pub fn int(&self, name: &str, default: i64) -> Result<i64, OpError> {
        match self.attr(name) {
            None => Ok(default),
            Some(Attr::I(value)) => Ok(*value),
            Some(_) => Err(self.wrong(name)),
        }
    }

    /// A float.
    pub fn float(&self, name: &str, default: f32) -> Result<f32, OpError> {
        match self.attr(name) {
            None => Ok(default),
            Some(Attr::F(value)) => Ok(*value),
            Some(_) => Err(self.wrong(name)),
        }
    }

    /// True or false.
    pub fn bool(&self, name: &str, default: bool) -> Result<bool, OpError> {
        match self.attr(name) {
            None => Ok(default),
            Some(Attr::B(value)) => Ok(*value),
            Some(_) => Err(self.wrong(name)),
        }
    }

    /// A text; empty where it is missing.
    pub fn text(&self, name: &str) -> Result<&'a str, OpError> {
        match self.attr(name) {
            None => Ok(""),
            Some(Attr::S(value)) => std::str::from_utf8(value).map_err(|_| self.wrong(name)),
            Some(_) => Err(self.wrong(name)),
        }
    }

    /// A type, which must be there.
    pub fn dtype(&self, name: &str) -> Result<DType, OpError> {
        match self.attr(name) {
            Some(Attr::Type(number)) => DType::from_wire(*number),
            _ => Err(self.wrong(name)),
        }
    }

    /// A type that may be left out.
    pub fn dtype_or(&self, name: &str, default: DType) -> Result<DType, OpError> {
        if self.attr(name).is_none() { Ok(default) } else { self.dtype(name) }
    }

    /// A shape, where there is one; it may be open.
    pub fn shape(&self, name: &str) -> Result<Option<&'a TensorShapeProto>, OpError> {
        match self.attr(name) {
            None => Ok(None),
            Some(Attr::Shape(shape)) => Ok(Some(shape)),
            Some(_) => Err(self.wrong(name)),
        }
    }

    /// A tensor, which must be there.
    pub fn tensor(&self, name: &str) -> Result<Tensor, OpError> {
        match self.attr(name) {
            Some(Attr::Tensor(tensor)) => codec::decode(tensor),
            _ => Err(self.wrong(name)),
        }
    }

    fn list(&self, name: &str) -> Result<Option<&'a ListValue>, OpError> {
        match self.attr(name) {
            None => Ok(None),
            Some(Attr::List(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(name)),
        }
    }

    /// A list of whole numbers; empty where it is missing.
    pub fn ints(&self, name: &str) -> Result<&'a [i64], OpError> {
        Ok(self.list(name)?.map_or(&[], |list| &list.i))
    }

    /// A list of types; empty where it is missing.
    pub fn dtypes(&self, name: &str) -> Result<Vec<DType>, OpError> {
        let list = self.list(name)?;
        list.map_or(&[][..], |list| &list.r#type).iter().map(|&n| DType::from_wire(n)).collect()
    }

    /// A list of texts; empty where it is missing.
    pub fn texts(&self, name: &str) -> Result<Vec<&'a str>, OpError> {
        let list = self.list(name)?.map_or(&[][..], |list| &list.s);
        list.iter().map(|s| std::str::from_utf8(s).map_err(|_| self.wrong(name))).collect()
    }

    /// A list of shapes; empty where it is missing.
    pub fn shapes(&self, name: &str) -> Result<&'a [TensorShapeProto], OpError> {
        Ok(self.list(name)?.map_or(&[], |list| &list.shape))
    }

    /// The name that a resource of this node has on its task: the attribute `shared_name`, or the node's own.
    pub fn shared_name(&self) -> Result<&'a str, OpError> {
        let shared = self.text("shared_name")?;
        Ok(if shared.is_empty() { self.name() } else { shared })
    }

    /// The nodes that this one wants to be beside: `_class` with `loc:@`.
    pub fn colocated(&self) -> impl Iterator<Item = &'a str> {
        let classes = match self.attr("_class") {
            Some(Attr::List(list)) => &list.s[..],
            _ => &[],
        };
        classes.iter().filter_map(|s| std::str::from_utf8(s).ok()?.strip_prefix("loc:@"))
    }
}
