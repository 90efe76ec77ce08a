//! The configuration, as its users see it.

mod errors;
mod hostile;
mod layers;
mod round_trip;
