//! Graphs in files: GraphDef as TensorFlow writes it, in binary or as text.

use std::path::{Path, PathBuf};

use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};

use super::proto::{GraphDef, MetaGraphDef};

/// What is wrong with the file of a graph.
#[derive(Debug, thiserror::Error)]
pub enum GraphFileError {
    /// It cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It holds no graph.
    #[error("{} is no GraphDef: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// Where, or why.
        reason: String,
    },
    /// Its name does not say in which form it is.
    #[error("{}: a graph's file ends in .pb (binary), .pbtxt (text) or .meta (beside a checkpoint)", path.display())]
    Form {
        /// The file.
        path: PathBuf,
    },
}

/// The messages of `tensorflow.proto` with their names.
const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/tensorflow.bin"));

/// Messages within messages, at most; as many as in the binary form.
const DEPTH: usize = 100;

/// Reads a graph: `.pb` in binary, `.pbtxt` as text, `.meta` what TensorFlow's Saver leaves beside a checkpoint.
pub fn read_graph(path: &Path) -> Result<GraphDef, GraphFileError> {
    let malformed = |reason| GraphFileError::Malformed { path: path.to_owned(), reason };
    let form = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
    if !["pb", "pbtxt", "meta"].contains(&form) {
        return Err(GraphFileError::Form { path: path.to_owned() });
    }
    let read = |source| GraphFileError::Read { path: path.to_owned(), source };
    let bytes = std::fs::read(path).map_err(read)?;
    let graph = match form {
        "pb" => GraphDef::decode(&*bytes).map_err(|error| malformed(error.to_string()))?,
        "meta" => {
            let meta =
                MetaGraphDef::decode(&*bytes).map_err(|error| malformed(error.to_string()))?;
            meta.graph_def.unwrap_or_default()
        }
        _ => from_text(&bytes).map_err(malformed)?,
    };
    if graph.node.is_empty() {
        return Err(malformed("it has no nodes".to_owned()));
    }
    Ok(graph)
}

fn from_text(bytes: &[u8]) -> Result<GraphDef, String> {
    let text = std::str::from_utf8(bytes).map_err(|error| error.to_string())?;
    if depth(bytes) > DEPTH {
        return Err(format!("messages lie deeper than {DEPTH} in each other"));
    }
    let words = |error: &dyn std::fmt::Display| error.to_string();
    let pool = DescriptorPool::decode(DESCRIPTORS).map_err(|error| words(&error))?;
    let message = pool.get_message_by_name("tensorflow.GraphDef").ok_or("it is not known")?;
    let graph = DynamicMessage::parse_text_format(message, text).map_err(|error| words(&error))?;
    graph.transcode_to().map_err(|error| words(&error))
}

/// How deep brackets lie in each other, at most; those in texts count too, which does no harm.
fn depth(text: &[u8]) -> usize {
    let (mut depth, mut most) = (0usize, 0);
    for byte in text {
        match byte {
            b'{' | b'<' => depth += 1,
            b'}' | b'>' => depth = depth.saturating_sub(1),
            _ => {}
        }
        most = most.max(depth);
    }
    most
}

#[cfg(test)]
mod tests {
    use super::super::proto::attr_value::Value;
    use super::*;

    const TEXT: &str = r#"
        node {
          name: "x" op: "Const" device: "/job:ps/task:0"
          attr { key: "dtype" value { type: DT_FLOAT } }
          attr { key: "value" value { tensor { dtype: DT_FLOAT tensor_shape { dim { size: 2 } } float_val: 1.5 float_val: -2 } } }
          experimental_type { type_id: TFT_PRODUCT }
        }
        node { name: "y" op: "Identity" input: "x" attr { key: "T" value { type: DT_FLOAT } } }
        library { }
        versions { producer: 2474 }
    "#;

    fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        (folder, path)
    }

    #[test]
    fn text_and_binary_are_the_same_graph() {
        let (_folder, path) = written("g.pbtxt", TEXT.as_bytes());
        let graph = read_graph(&path).unwrap();
        assert_eq!((graph.node.len(), &*graph.node[0].device), (2, "/job:ps/task:0"));
        assert_eq!(graph.node[1].attr["T"].value, Some(Value::Type(1)));
        let Some(Value::Tensor(value)) = &graph.node[0].attr["value"].value else { panic!() };
        assert_eq!(value.float_val, [1.5, -2.0]);
        let (_folder, path) = written("g.pb", &graph.encode_to_vec());
        assert_eq!(read_graph(&path).unwrap(), graph);
        let meta = MetaGraphDef { graph_def: Some(graph.clone()) };
        let (_folder, path) = written("g.meta", &meta.encode_to_vec());
        assert_eq!(read_graph(&path).unwrap(), graph);
    }

    #[test]
    fn what_is_no_graph_is_told() {
        let fails = |name: &str, bytes: &[u8]| {
            let (_folder, path) = written(name, bytes);
            read_graph(&path).unwrap_err().to_string()
        };
        assert!(fails("g.pbtxt", b"node { name: \"x\" colour: 3 }").contains("colour"));
        assert!(fails("g.pbtxt", b"node { name: \"x\"").contains("g.pbtxt"));
        assert!(fails("g.pbtxt", b"\xff\xfe").contains("utf-8"));
        assert!(fails("g.pbtxt", "node{".repeat(100_000).as_bytes()).contains("deeper"));
        assert!(fails("g.pb", &[0x0a, 0xff, 0xff, 0xff, 0x7f]).contains("g.pb"));
        assert!(fails("g.pb", b"").contains("no nodes"));
        assert!(fails("g.json", b"{}").contains(".pbtxt"));
        assert!(
            read_graph(Path::new("/nowhere/g.pb"))
                .unwrap_err()
                .to_string()
                .contains("/nowhere/g.pb")
        );
    }
}
