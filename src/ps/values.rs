//! [`Values`]: the packed variables of a shard with their averages and slots, and one step of the optimizer.

use std::sync::Arc;

use super::PsError;
use crate::device::{Device, Slab, UpdateSlabs};
use crate::store::{Applied, StoreSettings};

/// Which variables: a restore begins a new incarnation, each update a new step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Version {
    /// Chosen by the chief, ascending.
    pub incarnation: u64,
    /// Updates so far.
    pub step: u64,
}

/// Everything a checkpoint must hold of one shard: floats packed in the order of its ranges.
#[derive(Clone, Debug, PartialEq)]
pub struct ShardState {
    /// Updates so far.
    pub step: u64,
    /// The variables.
    pub params: Vec<f32>,
    /// Their moving averages, where they are kept.
    pub averages: Option<Vec<f32>>,
    /// The velocities, where the rule has momentum.
    pub slots: Option<Vec<f32>>,
}

/// Variables on one device, with what their optimizer keeps.
pub(super) struct Values {
    pub(super) device: Arc<dyn Device>,
    settings: StoreSettings,
    pub(super) step: u64,
    params: Slab,
    averages: Option<Slab>,
    slots: Option<Slab>,
}

impl Values {
    /// Zeros.
    pub(super) fn new(
        len: usize,
        settings: StoreSettings,
        device: Arc<dyn Device>,
    ) -> Result<Self, PsError> {
        let slab = |wanted: bool| wanted.then(|| device.alloc(len)).transpose();
        let averages = slab(settings.moving_average.is_some())?;
        let slots = slab(settings.rule.momentum.is_some())?;
        let params = device.alloc(len)?;
        Ok(Self { device, settings, step: 0, params, averages, slots })
    }

    pub(super) fn len(&self) -> usize {
        self.params.len()
    }

    /// New variables at step 0: averages start there too, slots at zero.
    pub(super) fn initialize(&mut self, params: &[f32]) -> Result<(), PsError> {
        self.check("variables", params.len())?;
        self.step = 0;
        self.params.write(0..params.len(), params)?;
        if let Some(averages) = &mut self.averages {
            averages.write(0..params.len(), params)?;
        }
        if let Some(slots) = &mut self.slots {
            *slots = self.device.alloc(params.len())?;
        }
        Ok(())
    }

    /// All or nothing.
    pub(super) fn restore(&mut self, from: &ShardState) -> Result<(), PsError> {
        self.check("variables", from.params.len())?;
        let mut writes = vec![(&mut self.params, &from.params)];
        let others = [
            ("moving averages", &mut self.averages, &from.averages),
            ("momentum", &mut self.slots, &from.slots),
        ];
        for (what, slab, values) in others {
            if let Some(slab) = slab {
                let values = values.as_ref().ok_or(PsError::Missing { what })?;
                check(what, slab.len(), values.len())?;
                writes.push((slab, values));
            }
        }
        for (slab, values) in writes {
            slab.write(0..values.len(), values)?;
        }
        self.step = from.step;
        Ok(())
    }

    pub(super) fn read(&self, into: &mut [f32]) -> Result<(), PsError> {
        self.check("variables", into.len())?;
        Ok(self.params.read(0..into.len(), into)?)
    }

    pub(super) fn state(&self) -> Result<Vec<Vec<f32>>, PsError> {
        self.averages.iter().chain(&self.slots).map(copy).collect()
    }

    pub(super) fn snapshot(&self) -> Result<ShardState, PsError> {
        Ok(ShardState {
            step: self.step,
            params: copy(&self.params)?,
            averages: self.averages.as_ref().map(copy).transpose()?,
            slots: self.slots.as_ref().map(copy).transpose()?,
        })
    }

    /// One optimizer step, as [`crate::store::LocalStore`] takes it.
    pub(super) fn apply(&mut self, mean: &Slab) -> Result<Applied, PsError> {
        let (rate, update) = self.settings.update_at(self.step);
        self.step += 1;
        let slabs = UpdateSlabs {
            params: &mut self.params,
            grads: mean,
            slots: self.slots.as_mut(),
            averages: self.averages.as_mut(),
        };
        self.device.update(update, slabs)?;
        Ok(Applied { global_step: self.step, rate, loss: None })
    }

    pub(super) fn check(&self, what: &'static str, found: usize) -> Result<(), PsError> {
        check(what, self.len(), found)
    }
}

fn copy(slab: &Slab) -> Result<Vec<f32>, PsError> {
    let mut values = vec![0.0; slab.len()];
    slab.read(0..slab.len(), &mut values)?;
    Ok(values)
}

fn check(what: &'static str, expected: usize, found: usize) -> Result<(), PsError> {
    if found == expected { Ok(()) } else { Err(PsError::Length { what, expected, found }) }
}
