//! [`Shard`]: the store of one ps task, and its rule about when to apply.

use std::ops::Range;
use std::sync::Arc;

use super::values::{ShardState, Values, Version};
use super::{Accumulator, Effect, PsError, Share, Tally, weights};
use crate::device::{Device, DeviceError, Slab};
use crate::store::{Applied, StoreSettings};

/// When gradients are applied.
#[derive(Clone, Debug)]
pub enum Mode {
    /// Each at once, whatever the others do.
    Async {
        /// Workers of the cluster.
        workers: usize,
        /// Updates that may lie between reading the variables and applying the gradient; `None` for any number.
        max_staleness: Option<u64>,
    },
    /// In rounds.
    Sync(Accumulator),
}

/// What became of an async push.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Pushed {
    /// It was applied.
    Applied(Applied),
    /// It was too old, and dropped.
    Rejected {
        /// Updates since its variables were read.
        staleness: u64,
        /// The current step.
        step: u64,
    },
}

/// The rule and what it counts.
enum Rule {
    Async { max_staleness: Option<u64>, tallies: Vec<Tally> },
    Sync(Accumulator),
}

/// The variables of one ps task, packed: its ranges of the slab one after the other.
///
/// Every float goes through what it goes through in a [`crate::store::LocalStore`] of the whole slab, to the bit.
/// Gradients arrive in slabs that the shard lends, so that a stream can fill one while others use the shard. Memory:
/// variables, velocities and averages, and one slab for each gradient on its way or in the round.
pub struct Shard {
    ranges: Vec<Range<usize>>,
    values: Values,
    incarnation: Option<u64>,
    rule: Rule,
    /// The gradients of a sync round, by the accumulator's slots.
    kept: Vec<Option<Slab>>,
    spare: Vec<Slab>,
}

impl Shard {
    /// An empty shard of these ranges, see [`super::assign`], of a slab whose first floats are `trained`.
    pub fn new(
        ranges: Vec<Range<usize>>,
        trained: usize,
        settings: StoreSettings,
        mode: Mode,
        device: Arc<dyn Device>,
    ) -> Result<Self, PsError> {
        let len = ranges.iter().map(Range::len).sum();
        let rule = match mode {
            Mode::Async { workers, max_staleness } => {
                Rule::Async { max_staleness, tallies: vec![Tally::default(); workers] }
            }
            Mode::Sync(accumulator) => Rule::Sync(accumulator),
        };
        // Statistics lie at the end of the whole slab, and so at the end of each part of it.
        let own = |range: &Range<usize>| trained.clamp(range.start, range.end) - range.start;
        let trained = ranges.iter().map(own).sum();
        let values = Values::new(len, trained, settings, device)?;
        Ok(Self { ranges, values, incarnation: None, rule, kept: vec![], spare: vec![] })
    }

    /// The ranges of the slab, in the order in which they are packed.
    pub fn ranges(&self) -> &[Range<usize>] {
        &self.ranges
    }

    /// Packed floats.
    pub fn floats(&self) -> usize {
        self.values.len()
    }

    /// Which variables there are now; `None` while nobody has initialized them, as after a restart of the task.
    pub fn version(&self) -> Option<Version> {
        self.incarnation.map(|incarnation| Version { incarnation, step: self.values.step })
    }

    /// What each worker's gradients came to.
    pub fn tallies(&self) -> Vec<Tally> {
        match &self.rule {
            Rule::Async { tallies, .. } => tallies.clone(),
            Rule::Sync(accumulator) => accumulator.tallies().collect(),
        }
    }

    /// The workers without whose gradients the round at hand does not end.
    pub fn owing(&self) -> Vec<usize> {
        match &self.rule {
            Rule::Async { .. } => Vec::new(),
            Rule::Sync(accumulator) => accumulator.owing(),
        }
    }

    /// The chief's first values, at step 0. Refused where variables live, unless the incarnation is newer than theirs.
    pub fn initialize(&mut self, incarnation: u64, values: &[f32]) -> Result<Vec<Effect>, PsError> {
        self.may_replace(incarnation)?;
        self.values.initialize(values)?;
        Ok(self.replaced(incarnation))
    }

    /// Takes over a snapshot, under the same condition as [`Shard::initialize`]. Who waits is released.
    pub fn restore(&mut self, incarnation: u64, from: &ShardState) -> Result<Vec<Effect>, PsError> {
        self.may_replace(incarnation)?;
        self.values.restore(from)?;
        Ok(self.replaced(incarnation))
    }

    /// The variables as they are now, and with `everything` the averages and velocities after them, where there are any. They do
    /// not change while they are held; an update copies them first.
    pub fn views(&self, everything: bool) -> Result<(Version, Vec<Arc<Slab>>), PsError> {
        Ok((self.version().ok_or(PsError::Empty)?, self.values.views(everything)))
    }

    /// Copies everything that is needed to go on.
    pub fn snapshot(&self) -> Result<ShardState, PsError> {
        self.version().ok_or(PsError::Empty)?;
        self.values.snapshot()
    }

    /// A slab for an incoming gradient, with anything in it. One whose stream breaks off is simply dropped.
    pub fn lend(&mut self) -> Result<Slab, PsError> {
        let fresh = || Ok(self.values.device.alloc(self.values.len())?);
        self.spare.pop().map_or_else(fresh, Ok)
    }

    /// Async: applies a gradient that was computed on the variables of version `seen`, unless it is too old.
    pub fn push(&mut self, worker: usize, seen: Version, grad: Slab) -> Result<Pushed, PsError> {
        self.check(seen, &grad)?;
        let Rule::Async { max_staleness, tallies } = &mut self.rule else {
            return Err(PsError::Mode { mode: "sync" });
        };
        let workers = tallies.len();
        let tally = tallies.get_mut(worker).ok_or(PsError::Stranger { worker, workers })?;
        let staleness = self.values.step.saturating_sub(seen.step);
        let pushed = if max_staleness.is_some_and(|most| staleness > most) {
            tally.stale += 1;
            Pushed::Rejected { staleness, step: self.values.step }
        } else {
            tally.applied += 1;
            Pushed::Applied(self.values.apply(&grad)?)
        };
        self.spare.push(grad);
        Ok(pushed)
    }

    /// Sync: offers a gradient, the mean over `examples`, that was computed on the variables of version `seen`.
    ///
    /// The effects tell whom to release; what they tell about gradients is done already.
    pub fn offer(
        &mut self,
        worker: usize,
        seen: Version,
        examples: u64,
        grad: Slab,
    ) -> Result<Vec<Effect>, PsError> {
        self.check(seen, &grad)?;
        let effects = self.rounds()?.offer(worker, seen.step, examples);
        self.carry_out(effects, Some(grad))
    }

    /// Sync: a worker comes (back); see [`Accumulator::join`].
    pub fn join(&mut self, worker: usize) -> Result<Vec<Effect>, PsError> {
        let effects = self.rounds()?.join(worker);
        self.carry_out(effects, None)
    }

    /// Sync: a worker died; see [`Accumulator::leave`].
    pub fn leave(&mut self, worker: usize) -> Result<Vec<Effect>, PsError> {
        let effects = self.rounds()?.leave(worker);
        self.carry_out(effects, None)
    }

    /// Sync: a worker has no more data; see [`Accumulator::finish`].
    pub fn finish(&mut self, worker: usize) -> Result<Vec<Effect>, PsError> {
        let effects = self.rounds()?.finish(worker);
        self.carry_out(effects, None)
    }

    fn may_replace(&self, asked: u64) -> Result<(), PsError> {
        match self.incarnation {
            Some(current) if current >= asked => Err(PsError::Initialized { current, asked }),
            _ => Ok(()),
        }
    }

    fn replaced(&mut self, incarnation: u64) -> Vec<Effect> {
        self.incarnation = Some(incarnation);
        self.spare.extend(self.kept.drain(..).flatten());
        match &mut self.rule {
            Rule::Sync(accumulator) => accumulator.reset(self.values.step),
            Rule::Async { .. } => Vec::new(),
        }
    }

    fn rounds(&mut self) -> Result<&mut Accumulator, PsError> {
        match &mut self.rule {
            Rule::Sync(accumulator) => Ok(accumulator),
            Rule::Async { .. } => Err(PsError::Mode { mode: "async" }),
        }
    }

    fn carry_out(
        &mut self,
        effects: Vec<Effect>,
        mut grad: Option<Slab>,
    ) -> Result<Vec<Effect>, PsError> {
        for effect in &effects {
            match effect {
                Effect::Keep { slot } => {
                    self.kept.resize_with(self.kept.len().max(slot + 1), || None);
                    self.kept[*slot] = grad.take();
                }
                Effect::Apply { shares } => self.apply(shares)?,
                _ => {}
            }
        }
        self.spare.extend(grad);
        Ok(effects)
    }

    fn apply(&mut self, shares: &[Share]) -> Result<(), PsError> {
        let (factors, scale) = weights(shares);
        let take = |share: &Share| self.kept.get_mut(share.slot).and_then(Option::take);
        let mut grads: Vec<Slab> = shares.iter().filter_map(take).collect();
        for (grad, factor) in grads.iter_mut().zip(factors) {
            if factor != 1.0 {
                let values = grad.as_host_mut().ok_or_else(|| DeviceError::Mismatch {
                    device: self.values.device.name().to_string(),
                    reason: "a ps task holds its variables in the host's memory".to_owned(),
                })?;
                values.iter_mut().for_each(|x| *x *= factor);
            }
        }
        self.values.device.sum(&mut grads, scale)?;
        if let Some(mean) = grads.first() {
            self.values.apply(mean)?;
        }
        self.spare.append(&mut grads);
        Ok(())
    }

    fn check(&self, seen: Version, grad: &Slab) -> Result<(), PsError> {
        let current = self.incarnation.ok_or(PsError::Empty)?;
        if seen.incarnation != current {
            return Err(PsError::Incarnation { seen: seen.incarnation, current });
        }
        self.values.check("gradient", grad.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::CpuDevice;
    use crate::optim::{Schedule, UpdateRule};
    use crate::ps::{Rounds, WhenShort, Why};

    fn settings() -> StoreSettings {
        let rule = UpdateRule { momentum: Some(0.9), nesterov: true, clip: Some(2.0) };
        let schedule = Schedule::constant(0.1);
        StoreSettings { seed: 1, rule, schedule, moving_average: Some(0.999) }
    }

    fn device() -> Arc<dyn Device> {
        Arc::new(CpuDevice::new(0, 1).unwrap())
    }

    fn sync(workers: usize) -> Mode {
        let rounds = Rounds { workers, aggregate: workers, when_short: WhenShort::Wait };
        Mode::Sync(Accumulator::new(rounds, 0))
    }

    fn free(max_staleness: Option<u64>) -> Mode {
        Mode::Async { workers: 2, max_staleness }
    }

    fn small(mode: Mode) -> Shard {
        Shard::new(vec![4..7, 16..17], 17, settings(), mode, device()).unwrap()
    }

    fn lent(shard: &mut Shard, values: &[f32]) -> Slab {
        let mut slab = shard.lend().unwrap();
        slab.write(0..values.len(), values).unwrap();
        slab
    }

    #[test]
    fn async_rejects_and_counts_what_is_too_old() {
        let mut shard = small(free(Some(1)));
        shard.initialize(1, &[0.0; 4]).unwrap();
        let seen = shard.version().unwrap();
        let mut push = |worker| {
            let grad = lent(&mut shard, &[1.0; 4]);
            shard.push(worker, seen, grad)
        };
        assert_eq!(
            push(0).unwrap(),
            Pushed::Applied(Applied { global_step: 1, rate: 0.1, loss: None })
        );
        assert_eq!(
            push(1).unwrap(),
            Pushed::Applied(Applied { global_step: 2, rate: 0.1, loss: None })
        );
        assert_eq!(push(1).unwrap(), Pushed::Rejected { staleness: 2, step: 2 });
        let error = push(2).unwrap_err();
        assert_eq!(error.to_string(), "there is no worker 2; the cluster has 2");
        let tally = |applied, stale| Tally { applied, stale };
        assert_eq!(shard.tallies(), [tally(1, 0), tally(1, 1)]);
    }

    #[test]
    fn living_variables_are_not_overwritten() {
        let mut shard = small(free(None));
        assert!(shard.version().is_none());
        assert!(matches!(shard.views(false), Err(PsError::Empty)));
        assert!(matches!(shard.snapshot(), Err(PsError::Empty)));
        shard.initialize(3, &[1.0; 4]).unwrap();
        let seen = shard.version().unwrap();
        let grad = lent(&mut shard, &[1.0; 4]);
        shard.push(0, seen, grad).unwrap();
        let saved = shard.snapshot().unwrap();
        for old in [2, 3] {
            assert!(matches!(shard.restore(old, &saved), Err(PsError::Initialized { .. })));
            assert!(matches!(shard.initialize(old, &[0.0; 4]), Err(PsError::Initialized { .. })));
        }
        let grad = lent(&mut shard, &[2.0; 4]);
        shard.push(0, seen, grad).unwrap();
        shard.restore(4, &saved).unwrap();
        assert_eq!(shard.snapshot().unwrap(), saved);
        let error = shard.push(0, seen, Slab::host(4).unwrap()).unwrap_err();
        assert!(matches!(error, PsError::Incarnation { seen: 3, current: 4 }));
        // A task that restarted empty goes on from there.
        let mut reborn = small(free(None));
        reborn.restore(5, &saved).unwrap();
        let seen = reborn.version().unwrap();
        assert_eq!(seen, Version { incarnation: 5, step: 1 });
        for shard in [&mut reborn, &mut shard] {
            let (seen, grad) = (shard.version().unwrap(), lent(shard, &[3.0; 4]));
            shard.push(0, seen, grad).unwrap();
        }
        assert_eq!(reborn.snapshot().unwrap(), shard.snapshot().unwrap());
    }

    #[test]
    fn a_restore_voids_the_round() {
        let mut shard = small(sync(2));
        // Who dies and comes back before the first values takes part.
        shard.leave(0).unwrap();
        shard.join(0).unwrap();
        shard.initialize(1, &[0.0; 4]).unwrap();
        let (seen, saved) = (shard.version().unwrap(), shard.snapshot().unwrap());
        let grad = lent(&mut shard, &[1.0; 4]);
        assert_eq!(shard.offer(0, seen, 1, grad).unwrap(), [Effect::Keep { slot: 0 }]);
        let effects = shard.restore(2, &ShardState { step: 70, ..saved }).unwrap();
        assert_eq!(effects, [Effect::Release { to: vec![0], step: 70 }]);
        let stale = Version { incarnation: 2, step: 69 };
        let grad = lent(&mut shard, &[1.0; 4]);
        let effects = shard.offer(1, stale, 1, grad).unwrap();
        let released = Effect::Release { to: vec![1], step: 70 };
        assert_eq!(effects, [Effect::Drop { worker: 1, why: Why::Stale }, released]);
    }

    #[test]
    fn slabs_are_used_again() {
        let mut shard = small(sync(3));
        shard.initialize(1, &[0.0; 4]).unwrap();
        for round in 0..100 {
            // A worker that died and is back offers twice; one is stale.
            for worker in [0, 1, 1, 2, 0] {
                let seen = Version { incarnation: 1, step: round };
                let grad = lent(&mut shard, &[1.0; 4]);
                shard.offer(worker, seen, 1, grad).unwrap();
            }
            let slabs = shard.spare.len() + shard.kept.iter().flatten().count();
            assert_eq!(slabs, 3, "in round {round}");
        }
        assert_eq!(shard.version(), Some(Version { incarnation: 1, step: 100 }));
    }

    #[test]
    fn bad_input_is_refused_and_changes_nothing() {
        let mut shard = small(sync(2));
        assert!(matches!(shard.initialize(1, &[0.0; 5]), Err(PsError::Length { .. })));
        shard.initialize(1, &[0.5; 4]).unwrap();
        let (seen, saved) = (shard.version().unwrap(), shard.snapshot().unwrap());
        let slab = |len| Slab::host(len).unwrap();
        assert!(matches!(shard.push(0, seen, slab(4)), Err(PsError::Mode { mode: "sync" })));
        assert!(matches!(shard.offer(0, seen, 1, slab(3)), Err(PsError::Length { .. })));
        let short = ShardState { slots: Some(vec![1.0; 3]), params: vec![9.0; 4], ..saved.clone() };
        assert!(matches!(shard.restore(2, &short), Err(PsError::Length { what: "momentum", .. })));
        let none = ShardState { averages: None, params: vec![9.0; 4], ..saved.clone() };
        assert!(matches!(shard.restore(2, &none), Err(PsError::Missing { .. })));
        assert_eq!((shard.version(), shard.snapshot().unwrap()), (Some(seen), saved));
        assert!(matches!(small(free(None)).finish(0), Err(PsError::Mode { mode: "async" })));
    }
}
