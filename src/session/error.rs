//! [`OpError`]: what a session's client is told, in TensorFlow's codes.

use std::fmt;

/// TensorFlow's status codes, which are gRPC's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Code {
    /// The step was ended from outside.
    Cancelled = 1,
    /// Something that has no code of its own.
    Unknown = 2,
    /// The graph, a feed or an operand is wrong.
    InvalidArgument = 3,
    /// It took longer than the client allowed.
    DeadlineExceeded = 4,
    /// A name that nobody knows.
    NotFound = 5,
    /// A name that is taken.
    AlreadyExists = 6,
    /// A file that may not be used.
    PermissionDenied = 7,
    /// Too large.
    ResourceExhausted = 8,
    /// Such as a variable without a value.
    FailedPrecondition = 9,
    /// The session is gone.
    Aborted = 10,
    /// Such as a queue that is closed and empty.
    OutOfRange = 11,
    /// An operation that this program does not have.
    Unimplemented = 12,
    /// An error of this program.
    Internal = 13,
    /// A task is not there.
    Unavailable = 14,
    /// A file is damaged.
    DataLoss = 15,
}

impl Code {
    /// The code of a number on the wire; those that nobody has defined are [`Code::Unknown`].
    pub fn from_wire(number: i32) -> Self {
        use Code::*;
        let all = [
            Cancelled,
            Unknown,
            InvalidArgument,
            DeadlineExceeded,
            NotFound,
            AlreadyExists,
            PermissionDenied,
            ResourceExhausted,
            FailedPrecondition,
            Aborted,
            OutOfRange,
            Unimplemented,
            Internal,
            Unavailable,
            DataLoss,
        ];
        all.into_iter().find(|code| *code as i32 == number).unwrap_or(Unknown)
    }
}

/// A failure with its code; the text is what the client's exception shows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct OpError {
    /// The class of the client's exception.
    pub code: Code,
    /// What happened and to whom.
    pub message: String,
}

/// One constructor for each code in use.
macro_rules! constructors {
    ($($(#[$doc:meta])* $name:ident => $code:ident;)*) => {
        impl OpError {
            $($(#[$doc])*
            pub fn $name(message: impl fmt::Display) -> Self {
                Self { code: Code::$code, message: message.to_string() }
            })*
        }
    };
}

constructors! {
    /// [`Code::Cancelled`].
    cancelled => Cancelled;
    /// [`Code::InvalidArgument`].
    invalid => InvalidArgument;
    /// [`Code::DeadlineExceeded`].
    deadline => DeadlineExceeded;
    /// [`Code::NotFound`].
    not_found => NotFound;
    /// [`Code::AlreadyExists`].
    exists => AlreadyExists;
    /// [`Code::ResourceExhausted`].
    exhausted => ResourceExhausted;
    /// [`Code::FailedPrecondition`].
    precondition => FailedPrecondition;
    /// [`Code::Aborted`].
    aborted => Aborted;
    /// [`Code::OutOfRange`].
    out_of_range => OutOfRange;
    /// [`Code::Unimplemented`].
    unimplemented => Unimplemented;
    /// [`Code::Internal`].
    internal => Internal;
    /// [`Code::Unavailable`].
    unavailable => Unavailable;
    /// [`Code::DataLoss`].
    data_loss => DataLoss;
}

impl OpError {
    /// The error with the node that it happened in, as TensorFlow's client looks for it.
    pub fn at(mut self, node: &str) -> Self {
        self.message = format!("{}\n\t [[{{{{node {node}}}}}]]", self.message);
        self
    }
}

/// Marks errors that only follow from another task's, as TensorFlow's servers do among themselves.
const DERIVED: &str = "[_Derived_]";

impl OpError {
    /// The error of a status on the wire.
    pub fn from_wire(code: i32, message: String) -> Self {
        Self { code: Code::from_wire(code), message }
    }

    /// The error as one that follows from another, which the step's master hears of too.
    pub fn derived(mut self) -> Self {
        if !self.is_derived() {
            self.message.insert_str(0, DERIVED);
        }
        self
    }

    /// Whether it follows from another.
    pub fn is_derived(&self) -> bool {
        self.message.starts_with(DERIVED)
    }

    /// The error without the mark.
    pub fn root(mut self) -> Self {
        while self.is_derived() {
            self.message.drain(..DERIVED.len());
        }
        self
    }
}
