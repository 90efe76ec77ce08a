//! [`LocalStore`]: variables in this process.

use std::sync::Arc;

use super::init::initialize;
use super::{Applied, Pulled, State, StoreError, VariableStore};
use crate::device::{Device, Slab, Update, UpdateSlabs};
use crate::graph::VarTable;
use crate::optim::{Schedule, UpdateRule, average_decay};
use crate::tensor::HostTensor;

const AVERAGE: &str = "ExponentialMovingAverage";
const VELOCITY: &str = "Momentum";

/// How a store starts and changes its variables.
#[derive(Clone, Debug)]
pub struct StoreSettings {
    /// Of the initial values.
    pub seed: u64,
    /// What a step does.
    pub rule: UpdateRule,
    /// How large it is.
    pub schedule: Schedule,
    /// Decay of the moving averages; `None` keeps none.
    pub moving_average: Option<f32>,
}

/// One master copy for all towers, or one per tower (`replicated`, or `independent` when gradients are not averaged).
pub struct LocalStore {
    table: Arc<VarTable>,
    settings: StoreSettings,
    /// Who applies updates to each master.
    devices: Vec<Arc<dyn Device>>,
    masters: Vec<Slab>,
    /// Velocities, one per master where the rule has momentum.
    slots: Vec<Slab>,
    /// Averages of the first master, the one that is saved.
    averages: Option<Slab>,
    global_step: u64,
}

impl LocalStore {
    /// A master on each of `devices`, at their initial values; the averages start there too.
    pub fn new(
        table: Arc<VarTable>,
        settings: StoreSettings,
        devices: Vec<Arc<dyn Device>>,
    ) -> Result<Self, StoreError> {
        let len = table.slab_len();
        let mut initial = vec![0.0; len];
        initialize(&table, settings.seed, &mut initial);
        let mut masters = Vec::new();
        let mut slots = Vec::new();
        for device in &devices {
            let mut master = device.alloc(len)?;
            master.write(0..len, &initial)?;
            masters.push(master);
            if settings.rule.momentum.is_some() {
                slots.push(device.alloc(len)?);
            }
        }
        let averages = match settings.moving_average {
            Some(_) => {
                let mut averages = devices[0].alloc(len)?;
                averages.write(0..len, &initial)?;
                Some(averages)
            }
            None => None,
        };
        Ok(Self { table, settings, devices, masters, slots, averages, global_step: 0 })
    }

    /// The slabs that are saved, with the suffix of their tensors' names.
    fn saved(&self) -> Vec<(Option<&'static str>, &Slab)> {
        let mut saved = vec![(None, &self.masters[0])];
        saved.extend(self.averages.iter().map(|slab| (Some(AVERAGE), slab)));
        saved.extend(self.slots.first().map(|slab| (Some(VELOCITY), slab)));
        saved
    }
}

fn tensor_name(variable: &str, suffix: Option<&str>) -> String {
    suffix.map_or_else(|| variable.to_owned(), |suffix| format!("{variable}/{suffix}"))
}

impl VariableStore for LocalStore {
    fn pull(&mut self) -> Result<Pulled<'_>, StoreError> {
        Ok(Pulled { replicas: &self.masters })
    }

    fn apply(&mut self, mean: &[Slab]) -> Result<Applied, StoreError> {
        let rate = self.settings.schedule.rate(self.global_step);
        self.global_step += 1;
        let update = Update {
            rule: self.settings.rule,
            rate: rate as f32,
            average_decay: average_decay(
                self.settings.moving_average.unwrap_or(0.0),
                self.global_step,
            ),
        };
        for (i, params) in self.masters.iter_mut().enumerate() {
            let slabs = UpdateSlabs {
                params,
                grads: &mean[i.min(mean.len() - 1)],
                slots: self.slots.get_mut(i),
                averages: self.averages.as_mut().filter(|_| i == 0),
            };
            self.devices[i].update(update, slabs)?;
        }
        Ok(Applied { global_step: self.global_step, rate })
    }

    fn global_step(&self) -> u64 {
        self.global_step
    }

    fn snapshot(&mut self) -> Result<State, StoreError> {
        let mut state = State { global_step: self.global_step, tensors: Vec::new() };
        for (suffix, slab) in self.saved() {
            for row in self.table.rows() {
                let mut values = vec![0.0; row.range().len()];
                slab.read(row.range(), &mut values)?;
                let tensor = HostTensor::f32(&row.shape, values).expect("the row tells its length");
                state.tensors.push((tensor_name(&row.name, suffix), tensor));
            }
        }
        Ok(state)
    }

    fn restore(&mut self, from: &State) -> Result<(), StoreError> {
        // Read everything before anything is changed.
        let mut slabs = Vec::new();
        for (suffix, _) in self.saved() {
            slabs.push((suffix, read_slab(&self.table, from, suffix)?));
        }
        for (suffix, values) in slabs {
            let targets: Vec<&mut Slab> = match suffix {
                None => self.masters.iter_mut().collect(),
                Some(AVERAGE) => self.averages.iter_mut().collect(),
                Some(_) => self.slots.iter_mut().collect(),
            };
            for slab in targets {
                slab.write(0..values.len(), &values)?;
            }
        }
        self.global_step = from.global_step;
        Ok(())
    }
}

/// The slab of a state's variables (`suffix` none), averages or slots.
fn read_slab(table: &VarTable, from: &State, suffix: Option<&str>) -> Result<Vec<f32>, StoreError> {
    let mut slab = vec![0.0; table.slab_len()];
    for row in table.rows() {
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
        table.rows().iter().all(|row| self.find(&tensor_name(&row.name, Some(AVERAGE))).is_some())
    }
}
