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

/// A slab of which readers keep what they saw: writing copies it first while anybody still reads.
struct Versions {
    now: Arc<Slab>,
    /// Still read, or free to be written again.
    before: Vec<Arc<Slab>>,
}

impl Versions {
    fn new(device: &dyn Device, len: usize) -> Result<Self, PsError> {
        Ok(Self { now: Arc::new(device.alloc(len)?), before: Vec::new() })
    }

    /// With what it holds now.
    fn write(&mut self, device: &dyn Device) -> Result<&mut Slab, PsError> {
        if Arc::get_mut(&mut self.now).is_none() {
            let free = self.before.iter_mut().position(|slab| Arc::get_mut(slab).is_some());
            let mut copy = match free {
                Some(free) => self.before.swap_remove(free),
                None => Arc::new(device.alloc(self.now.len())?),
            };
            if let Some(copy) = Arc::get_mut(&mut copy) {
                copy.copy_from(&self.now)?;
            }
            self.before.push(std::mem::replace(&mut self.now, copy));
        }
        // Nobody else has it now, so this does not fail.
        Arc::get_mut(&mut self.now).ok_or(PsError::Empty)
    }
}

/// Variables on one device, with what their optimizer keeps.
pub(super) struct Values {
    pub(super) device: Arc<dyn Device>,
    settings: StoreSettings,
    /// Floats that the optimizer changes; those behind are statistics.
    trained: usize,
    pub(super) step: u64,
    params: Versions,
    averages: Option<Versions>,
    slots: Option<Versions>,
}

impl Values {
    /// Zeros.
    pub(super) fn new(
        len: usize,
        trained: usize,
        settings: StoreSettings,
        device: Arc<dyn Device>,
    ) -> Result<Self, PsError> {
        let slab = || Versions::new(&*device, len);
        let averages = settings.moving_average.map(|_| slab()).transpose()?;
        let slots = settings.rule.momentum.map(|_| slab()).transpose()?;
        let params = slab()?;
        Ok(Self { device, settings, trained, step: 0, params, averages, slots })
    }

    pub(super) fn len(&self) -> usize {
        self.params.now.len()
    }

    /// New variables at step 0: averages start there too, slots at zero.
    pub(super) fn initialize(&mut self, params: &[f32]) -> Result<(), PsError> {
        self.check("variables", params.len())?;
        self.step = 0;
        for slab in std::iter::once(&mut self.params).chain(&mut self.averages) {
            slab.write(&*self.device)?.write(0..params.len(), params)?;
        }
        if let Some(slots) = &mut self.slots {
            *slots = Versions::new(&*self.device, params.len())?;
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
                check(what, slab.now.len(), values.len())?;
                writes.push((slab, values));
            }
        }
        for (slab, values) in writes {
            slab.write(&*self.device)?.write(0..values.len(), values)?;
        }
        self.step = from.step;
        Ok(())
    }

    /// The variables as they are now, and with `everything` the averages and slots after them.
    pub(super) fn views(&self, everything: bool) -> Vec<Arc<Slab>> {
        let others = self.averages.iter().chain(&self.slots).filter(|_| everything);
        std::iter::once(&self.params).chain(others).map(|slab| slab.now.clone()).collect()
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
        let (rate, update) = self.settings.update_at(self.step, self.trained);
        self.step += 1;
        let device = &*self.device;
        let slabs = UpdateSlabs {
            params: self.params.write(device)?,
            grads: mean,
            slots: self.slots.as_mut().map(|slab| slab.write(device)).transpose()?,
            averages: self.averages.as_mut().map(|slab| slab.write(device)).transpose()?,
        };
        device.update(update, slabs)?;
        Ok(Applied { global_step: self.step, rate, loss: None })
    }

    pub(super) fn check(&self, what: &'static str, found: usize) -> Result<(), PsError> {
        check(what, self.len(), found)
    }
}

fn copy(slab: &Versions) -> Result<Vec<f32>, PsError> {
    let mut values = vec![0.0; slab.now.len()];
    slab.now.read(0..slab.now.len(), &mut values)?;
    Ok(values)
}

fn check(what: &'static str, expected: usize, found: usize) -> Result<(), PsError> {
    if found == expected { Ok(()) } else { Err(PsError::Length { what, expected, found }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::CpuDevice;

    #[test]
    fn readers_keep_what_they_saw() {
        let device = CpuDevice::new(0, 1).unwrap();
        let mut slab = Versions::new(&device, 3).unwrap();
        let write = |slab: &mut Versions, value: f32| {
            slab.write(&device).unwrap().write(1..2, &[value]).unwrap();
        };
        let at = |slab: &Versions| slab.now.as_host().unwrap().as_ptr();
        write(&mut slab, 1.0);
        let (first, place) = (slab.now.clone(), at(&slab));
        write(&mut slab, 2.0);
        let second = slab.now.clone();
        write(&mut slab, 3.0);
        write(&mut slab, 4.0);
        let read = |slab: &Arc<Slab>| slab.as_host().unwrap().to_vec();
        assert_eq!([&first, &second, &slab.now].map(read), [1.0, 2.0, 4.0].map(|x| [0.0, x, 0.0]));
        // The memory of what nobody reads any more is written next.
        drop(first);
        let _third = slab.now.clone();
        write(&mut slab, 5.0);
        assert_eq!((at(&slab), slab.before.len()), (place, 2));
    }
}
