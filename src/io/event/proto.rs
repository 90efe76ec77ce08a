//! The parts of TensorFlow's `event.proto` and `summary.proto` that are used, written out by hand.

/// `Event`: one record of an event file.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Event {
    /// Seconds since the Unix epoch.
    #[prost(double, tag = "1")]
    pub(crate) wall_time: f64,
    #[prost(int64, tag = "2")]
    pub(crate) step: i64,
    #[prost(oneof = "What", tags = "3, 5, 7")]
    pub(crate) what: Option<What>,
}

/// `Event.what`.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum What {
    #[prost(string, tag = "3")]
    FileVersion(String),
    #[prost(message, tag = "5")]
    Summary(Summary),
    #[prost(message, tag = "7")]
    SessionLog(SessionLog),
}

/// `Summary`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Summary {
    #[prost(message, repeated, tag = "1")]
    pub(crate) value: Vec<SummaryValue>,
}

/// `Summary.Value`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SummaryValue {
    #[prost(string, tag = "1")]
    pub(crate) tag: String,
    #[prost(oneof = "Value", tags = "2, 4, 5")]
    pub(crate) value: Option<Value>,
}

/// `Summary.Value.value`. As a choice, a scalar of 0 is written too.
#[derive(Clone, PartialEq, prost::Oneof)]
pub(crate) enum Value {
    #[prost(float, tag = "2")]
    Simple(f32),
    #[prost(message, tag = "4")]
    Image(Image),
    #[prost(message, tag = "5")]
    Histo(HistogramProto),
}

/// `Summary.Image`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct Image {
    #[prost(int32, tag = "1")]
    pub(crate) height: i32,
    #[prost(int32, tag = "2")]
    pub(crate) width: i32,
    /// The number of channels; 3 is RGB.
    #[prost(int32, tag = "3")]
    pub(crate) colorspace: i32,
    /// A PNG file.
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) encoded_image_string: Vec<u8>,
}

/// `HistogramProto`: `bucket[i]` values lie below `bucket_limit[i]` and not below the limit before.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct HistogramProto {
    #[prost(double, tag = "1")]
    pub(crate) min: f64,
    #[prost(double, tag = "2")]
    pub(crate) max: f64,
    #[prost(double, tag = "3")]
    pub(crate) num: f64,
    #[prost(double, tag = "4")]
    pub(crate) sum: f64,
    #[prost(double, tag = "5")]
    pub(crate) sum_squares: f64,
    #[prost(double, repeated, packed = "true", tag = "6")]
    pub(crate) bucket_limit: Vec<f64>,
    #[prost(double, repeated, packed = "true", tag = "7")]
    pub(crate) bucket: Vec<f64>,
}

/// `SessionLog`.
#[derive(Clone, PartialEq, prost::Message)]
pub(crate) struct SessionLog {
    /// One of the constants below.
    #[prost(int32, tag = "1")]
    pub(crate) status: i32,
    #[prost(string, tag = "2")]
    pub(crate) checkpoint_path: String,
    #[prost(string, tag = "3")]
    pub(crate) msg: String,
}

impl SessionLog {
    pub(crate) const START: i32 = 1;
    pub(crate) const STOP: i32 = 2;
    pub(crate) const CHECKPOINT: i32 = 3;
}
