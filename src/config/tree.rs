//! A YAML (or JSON) value with the lines of its keys, before any key has a meaning.

use std::fmt;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Number, Value};
use serde_saphyr::{
    Error, MessageFormatter, NonFiniteFloatPolicy, Options, Spanned, UserMessageFormatter,
};

use super::suggest::cut;

/// Longest part of a parser's message worth repeating, in characters.
const LONGEST_MESSAGE: usize = 200;

/// A parsed value.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Tree {
    /// A scalar or a list.
    Leaf(Value),
    /// A mapping, in the order written.
    Map(Vec<Entry>),
}

/// One key of a mapping.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Entry {
    pub(crate) key: String,
    /// Line of the key, from 1; `None` outside files.
    pub(crate) line: Option<u64>,
    pub(crate) tree: Tree,
}

/// What the YAML parser objected to.
#[derive(Debug, PartialEq)]
pub(crate) struct SyntaxError {
    /// From 1, where known.
    pub(crate) line: Option<u64>,
    pub(crate) message: String,
}

impl Tree {
    /// Parses YAML text; text without a document is an empty mapping.
    pub(crate) fn parse(text: &str) -> Result<Self, SyntaxError> {
        serde_saphyr::from_str_with_options::<Option<Self>>(text, options())
            .map(|tree| tree.unwrap_or(Self::Map(Vec::new())))
            .map_err(|error| syntax_error(&error))
    }

    /// Wraps the value in mappings along a dotted key.
    pub(crate) fn under(self, dotted: &str) -> Self {
        dotted.rsplit('.').fold(self, |tree, key| {
            Self::Map(vec![Entry { key: key.to_owned(), line: None, tree }])
        })
    }

    /// The plain value, without lines.
    pub(crate) fn into_value(self) -> Value {
        match self {
            Self::Leaf(value) => value,
            Self::Map(entries) => Value::Object(
                entries.into_iter().map(|entry| (entry.key, entry.tree.into_value())).collect(),
            ),
        }
    }
}

impl From<Value> for Tree {
    fn from(value: Value) -> Self {
        match value {
            Value::Object(map) => Self::Map(map.into_iter().map(Entry::from).collect()),
            leaf => Self::Leaf(leaf),
        }
    }
}

impl From<(String, Value)> for Entry {
    fn from((key, value): (String, Value)) -> Self {
        Self { key, line: None, tree: value.into() }
    }
}

/// A configuration is small and flat: whatever is not, is refused early.
fn options() -> Options {
    serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: 16,
            max_documents: 2,
            max_nodes: 10_000,
            max_anchors: 100,
            max_aliases: 100,
            max_total_scalar_bytes: 1 << 20,
        },
        alias_limits: serde_saphyr::alias_limits! {
            max_total_replayed_events: 10_000,
        },
        // YAML 1.2: `off` and `no` are text, not `false`.
        strict_booleans: true,
        leading_zero_numbers_as_strings: true,
        // As text they reach the check of their key, which names it.
        non_finite_float_policy: NonFiniteFloatPolicy::AsString,
        with_snippet: false,
    }
}

fn syntax_error(error: &Error) -> SyntaxError {
    let line = error.location().map(|location| location.line()).filter(|line| *line > 0);
    let error = match error.without_snippet() {
        Error::AliasError { error, .. } => error,
        error => error,
    };
    SyntaxError { line, message: cut(&UserMessageFormatter.format_message(error), LONGEST_MESSAGE) }
}

impl<'de> Deserialize<'de> for Tree {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TreeVisitor)
    }
}

struct TreeVisitor;

impl<'de> Visitor<'de> for TreeVisitor {
    type Value = Tree;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a mapping, a list, text, a number, true, false or null")
    }

    fn visit_unit<E>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Value::Null))
    }

    fn visit_none<E>(self) -> Result<Tree, E> {
        Ok(Tree::Leaf(Value::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Tree, E> {
        let number = Number::from_f64(value).ok_or_else(|| E::custom("number is not finite"))?;
        Ok(Tree::Leaf(number.into()))
    }

    fn visit_str<E>(self, value: &str) -> Result<Tree, E> {
        Ok(Tree::Leaf(value.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Tree, A::Error> {
        let mut list = Vec::new();
        while let Some(item) = items.next_element::<Tree>()? {
            list.push(item.into_value());
        }
        Ok(Tree::Leaf(list.into()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Tree, A::Error> {
        let mut map = Vec::new();
        while let Some((key, tree)) = entries.next_entry::<Spanned<String>, Tree>()? {
            let line = Some(key.referenced.line()).filter(|line| *line > 0);
            map.push(Entry { key: key.value, line, tree });
        }
        Ok(Tree::Map(map))
    }
}
