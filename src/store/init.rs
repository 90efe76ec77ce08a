//! Initial values: a function of the seed and the variable alone, identical on every host.

use crate::graph::{Init, VarTable};
use crate::util::rng::{Purpose, Stream};

/// Fills a slab with every variable's first values.
pub(super) fn initialize(table: &VarTable, seed: u64, slab: &mut [f32]) {
    for (index, row) in table.rows().iter().enumerate() {
        let values = &mut slab[row.range()];
        match row.init {
            Init::Constant(value) => values.fill(value),
            Init::TruncatedNormal(stddev) => {
                let mut stream = Stream::new(seed, Purpose::Init, index as u64);
                values.iter_mut().for_each(|v| *v = stddev * stream.truncated_normal());
            }
        }
    }
}
