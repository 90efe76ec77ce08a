//! [`StateLayout`]: the tensors of a store by TensorFlow's names, and back.

use std::sync::Arc;

use super::{State, StoreError, StoreSettings};
use crate::graph::{Role, VarRow, VarTable};
use crate::tensor::HostTensor;

const AVERAGE: &str = "ExponentialMovingAverage";
const VELOCITY: &str = "Momentum";

/// Which slabs a store keeps: its variables, then their averages and velocities where the settings ask for them.
#[derive(Clone, Debug)]
pub struct StateLayout {
    table: Arc<VarTable>,
    suffixes: Vec<Option<&'static str>>,
}

impl StateLayout {
    /// Of a store with these settings.
    pub fn new(table: Arc<VarTable>, settings: &StoreSettings) -> Self {
        let mut suffixes = vec![None];
        suffixes.extend(settings.moving_average.map(|_| Some(AVERAGE)));
        suffixes.extend(settings.rule.momentum.map(|_| Some(VELOCITY)));
        Self { table, suffixes }
    }

    /// How many slabs.
    pub fn parts(&self) -> usize {
        self.suffixes.len()
    }

    /// The tensors of whole slabs, in the order of the layout.
    pub fn state(&self, global_step: u64, slabs: &[Vec<f32>]) -> State {
        let mut state = State { global_step, tensors: Vec::new() };
        for (suffix, slab) in self.suffixes.iter().zip(slabs) {
            for row in self.table.rows().iter().filter(|row| has(row, *suffix)) {
                let values = slab[row.range()].to_vec();
                let tensor = HostTensor::f32(&row.shape, values).expect("the row tells its length");
                state.tensors.push((tensor_name(&row.name, *suffix), tensor));
            }
        }
        state
    }

    /// The whole slabs of a state, in the order of the layout; every tensor must be there with its shape.
    pub fn slabs(&self, state: &State) -> Result<Vec<Vec<f32>>, StoreError> {
        self.suffixes.iter().map(|suffix| read_slab(&self.table, state, *suffix)).collect()
    }
}

/// Whether a state has such a tensor of the variable: statistics have no averages and no velocities.
fn has(row: &VarRow, suffix: Option<&str>) -> bool {
    suffix.is_none() || row.role == Role::Trained
}

fn tensor_name(variable: &str, suffix: Option<&str>) -> String {
    suffix.map_or_else(|| variable.to_owned(), |suffix| format!("{variable}/{suffix}"))
}

/// The slab of a state's variables (`suffix` none), averages or slots.
fn read_slab(table: &VarTable, from: &State, suffix: Option<&str>) -> Result<Vec<f32>, StoreError> {
    let mut slab = vec![0.0; table.slab_len()];
    for row in table.rows() {
        // Averages of statistics are the statistics.
        let suffix = suffix.filter(|_| has(row, suffix));
        let name = tensor_name(&row.name, suffix);
        let Some(tensor) = from.find(&name) else {
            let hint = match suffix {
                None => "it was written by another model",
                Some(AVERAGE) => "it was written without moving averages; set moving_average: off",
                Some(_) => "it was written without momentum; use the optimizer it was trained with",
            };
            return Err(StoreError::Missing { name, hint });
        };
        match tensor.as_f32() {
            Some(values) if tensor.shape() == row.shape => {
                slab[row.range()].copy_from_slice(values);
            }
            _ => {
                let (found, expected) = (tensor.shape(), row.shape.clone());
                return Err(StoreError::Shape { name, found, expected });
            }
        }
    }
    Ok(slab)
}

impl State {
    /// A slab of the variables, raw or averaged, for evaluation.
    pub fn variables(&self, table: &VarTable, averaged: bool) -> Result<Vec<f32>, StoreError> {
        read_slab(table, self, averaged.then_some(AVERAGE))
    }

    /// Whether moving averages were kept.
    pub fn has_averages(&self, table: &VarTable) -> bool {
        let mut rows = table.rows().iter().filter(|row| has(row, Some(AVERAGE)));
        rows.all(|row| self.find(&tensor_name(&row.name, Some(AVERAGE))).is_some())
    }
}
