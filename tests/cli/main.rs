//! The program as its users run it: the built binary, its lines, files and exit codes.

mod chaos;
mod cluster;
mod eval;
mod graphs;
mod refusals;
mod resume;
mod runs;
mod security;
mod support;
