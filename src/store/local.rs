//! [`LocalStore`]: variables in this process.

use std::sync::Arc;

use super::init::initialize;
use super::{Applied, Contribution, Pulled, State, StateLayout, StoreError, VariableStore};
use crate::device::{Device, Slab, Update, UpdateSlabs};
use crate::graph::VarTable;
use crate::optim::{Schedule, UpdateRule, average_decay};

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

impl StoreSettings {
    /// The rate and the numbers of the update that starts at `step`, of slabs with so many floats `trained`: averages come after it,
    /// at the next step.
    pub(crate) fn update_at(&self, step: u64, trained: usize) -> (f64, Update) {
        let rate = self.schedule.rate(step);
        let decay = average_decay(self.moving_average.unwrap_or(0.0), step + 1);
        let rule = self.rule;
        (rate, Update { rule, rate: rate as f32, average_decay: decay, trained })
    }
}

/// One master copy for all towers, or one per tower (`replicated`, or `independent` when gradients are not averaged).
pub struct LocalStore {
    layout: StateLayout,
    settings: StoreSettings,
    /// Who applies updates to each master.
    devices: Vec<Arc<dyn Device>>,
    masters: Vec<Slab>,
    /// Velocities, one per master where the rule has momentum.
    slots: Vec<Slab>,
    /// Averages of the first master, the one that is saved.
    averages: Option<Slab>,
    /// Floats that the optimizer changes; those behind are statistics.
    trained: usize,
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
        let trained = table.trained_len();
        let layout = StateLayout::new(table, &settings);
        let global_step = 0;
        Ok(Self { layout, settings, devices, masters, slots, averages, trained, global_step })
    }
}

impl VariableStore for LocalStore {
    fn pull(&mut self) -> Result<Pulled<'_>, StoreError> {
        Ok(Pulled::of(&self.masters))
    }

    fn apply(&mut self, mean: &[Slab], _share: Contribution) -> Result<Applied, StoreError> {
        let (rate, update) = self.settings.update_at(self.global_step, self.trained);
        self.global_step += 1;
        for (i, params) in self.masters.iter_mut().enumerate() {
            let slabs = UpdateSlabs {
                params,
                grads: &mean[i.min(mean.len() - 1)],
                slots: self.slots.get_mut(i),
                averages: self.averages.as_mut().filter(|_| i == 0),
            };
            self.devices[i].update(update, slabs)?;
        }
        Ok(Applied { global_step: self.global_step, rate, loss: None })
    }

    fn global_step(&self) -> u64 {
        self.global_step
    }

    fn snapshot(&mut self) -> Result<State, StoreError> {
        let mut slabs = Vec::new();
        let saved = [Some(&self.masters[0]), self.averages.as_ref(), self.slots.first()];
        for slab in saved.into_iter().flatten() {
            let mut values = vec![0.0; slab.len()];
            slab.read(0..slab.len(), &mut values)?;
            slabs.push(values);
        }
        Ok(self.layout.state(self.global_step, &slabs))
    }

    fn restore(&mut self, from: &State) -> Result<(), StoreError> {
        // Read everything before anything is changed.
        let mut slabs = self.layout.slabs(from)?.into_iter();
        let mut write = |targets: &mut [Slab]| {
            let Some(values) = (!targets.is_empty()).then(|| slabs.next()).flatten() else {
                return Ok(());
            };
            targets.iter_mut().try_for_each(|slab| slab.write(0..values.len(), &values))
        };
        write(&mut self.masters)?;
        write(self.averages.as_mut_slice())?;
        write(&mut self.slots)?;
        self.global_step = from.global_step;
        Ok(())
    }
}
