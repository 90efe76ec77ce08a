//! The parts of TensorFlow's `tensor_bundle.proto` that are used, written out by hand.

/// `BundleHeaderProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Header {
    #[prost(int32, tag = "1")]
    pub(super) num_shards: i32,
    /// 0 is little-endian.
    #[prost(int32, tag = "2")]
    pub(super) endianness: i32,
    #[prost(message, optional, tag = "3")]
    pub(super) version: Option<Version>,
}

/// `VersionDef`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Version {
    #[prost(int32, tag = "1")]
    pub(super) producer: i32,
    #[prost(int32, tag = "2")]
    pub(super) min_consumer: i32,
}

/// `BundleEntryProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Entry {
    #[prost(int32, tag = "1")]
    pub(super) dtype: i32,
    #[prost(message, optional, tag = "2")]
    pub(super) shape: Option<ShapeProto>,
    #[prost(int32, tag = "3")]
    pub(super) shard_id: i32,
    #[prost(int64, tag = "4")]
    pub(super) offset: i64,
    #[prost(int64, tag = "5")]
    pub(super) size: i64,
    /// Masked.
    #[prost(fixed32, tag = "6")]
    pub(super) crc32c: u32,
    /// `TensorSliceProto`s, of a variable saved in parts.
    #[prost(bytes = "vec", repeated, tag = "7")]
    pub(super) slices: Vec<Vec<u8>>,
}

/// `TensorShapeProto`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct ShapeProto {
    #[prost(message, repeated, tag = "2")]
    pub(super) dim: Vec<Dim>,
    #[prost(bool, tag = "3")]
    pub(super) unknown_rank: bool,
}

/// `TensorShapeProto.Dim`.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Dim {
    #[prost(int64, tag = "1")]
    pub(super) size: i64,
}
