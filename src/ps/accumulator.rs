//! [`Accumulator`]: synchronous rounds as a pure state machine, offers in, [`Effect`]s out.
//!
//! A gradient counts if it was computed at the current step and its worker has not given its share of the round.
//! With at least `aggregate` workers each gives one, and the first `aggregate` make the round: who comes later is a
//! backup, dropped and released at once. With fewer workers the gradients are dealt out evenly, lower workers first,
//! so that which gradients make a round never depends on who is fast. Shares are applied in the order of the workers.

use super::effect::{Effect, Share, Tally, Why};

/// What a round is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// Workers of the cluster; all are waited for from the first round on.
    pub workers: usize,
    /// Gradients of a round: `replicas_to_aggregate`; at least 1.
    pub aggregate: usize,
    /// What happens when workers die.
    pub when_short: WhenShort,
}

/// What happens when workers die and fewer gradients can come than a round needs. Those who finish are never awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhenShort {
    /// Wait for them to come back.
    Wait,
    /// A round needs no more than the living can give, as long as `min` workers live or have finished.
    GoOn {
        /// Workers.
        min: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    Dead,
    Finished,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    state: State,
    /// Its gradients in this round.
    given: usize,
    /// Whether it waits to be released.
    waiting: bool,
    tally: Tally,
}

/// Decides which gradients make a round. Holds numbers only; gradients stay with the caller, in slots.
#[derive(Clone, Debug)]
pub struct Accumulator {
    rounds: Rounds,
    step: u64,
    members: Vec<Member>,
    /// This round's, in the order in which they are added.
    shares: Vec<Share>,
}

impl Accumulator {
    /// At a step, with nothing in the round.
    pub fn new(rounds: Rounds, step: u64) -> Self {
        let member =
            Member { state: State::Live, given: 0, waiting: false, tally: Tally::default() };
        Self { rounds, step, members: vec![member; rounds.workers], shares: Vec::new() }
    }

    /// The current step: rounds so far.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// What each worker's gradients came to.
    pub fn tallies(&self) -> impl ExactSizeIterator<Item = Tally> {
        self.members.iter().map(|member| member.tally)
    }

    /// The workers that live and have a gradient to give to this round.
    pub fn owing(&self) -> Vec<usize> {
        let owes = |worker: &usize| {
            let member = &self.members[*worker];
            self.is_awaited(member) && member.given < self.share_of(*worker)
        };
        (0..self.members.len()).filter(owes).collect()
    }

    /// A worker offers a gradient, the mean over `examples`, that it computed on the variables of step `computed_at`.
    pub fn offer(&mut self, worker: usize, computed_at: u64, examples: u64) -> Vec<Effect> {
        let share = self.share_of(worker);
        let drop = |why| Effect::Drop { worker, why };
        let member = match self.members.get_mut(worker) {
            Some(member) if member.state == State::Live => member,
            _ => return vec![drop(Why::Stranger)],
        };
        if computed_at != self.step {
            member.tally.stale += 1;
            let mut effects = vec![drop(Why::Stale)];
            self.admit(worker, &mut effects);
            return effects;
        }
        if member.given == share {
            return vec![drop(Why::Extra)];
        }
        member.given += 1;
        let slot = self.shares.len();
        let place = self.shares.partition_point(|share| share.worker <= worker);
        self.shares.insert(place, Share { slot, worker, examples });
        let mut effects = vec![Effect::Keep { slot }];
        self.admit(worker, &mut effects);
        effects
    }

    /// A worker comes (back) and asks at which step to begin.
    pub fn join(&mut self, worker: usize) -> Vec<Effect> {
        let Some(member) = self.members.get_mut(worker) else {
            return vec![Effect::Drop { worker, why: Why::Stranger }];
        };
        member.state = State::Live;
        let mut effects = Vec::new();
        self.admit(worker, &mut effects);
        effects
    }

    /// A worker died. What it gave to this round stays in it.
    pub fn leave(&mut self, worker: usize) -> Vec<Effect> {
        self.part(worker, State::Dead)
    }

    /// A worker has no more data. Nobody waits for it any more.
    pub fn finish(&mut self, worker: usize) -> Vec<Effect> {
        self.part(worker, State::Finished)
    }

    /// The variables were set to those of another step: the round is void, and everybody who waits begins anew.
    pub fn reset(&mut self, step: u64) -> Vec<Effect> {
        self.step = step;
        let mut effects = Vec::new();
        self.begin_round(&mut effects);
        effects
    }

    /// Ends the round if it can end, else lets the worker go on if it has a gradient to give, else has it wait.
    fn admit(&mut self, worker: usize, effects: &mut Vec<Effect>) {
        let share = self.share_of(worker);
        self.members[worker].waiting = true;
        self.end_round(effects);
        let member = &mut self.members[worker];
        if member.waiting && member.given < share {
            member.waiting = false;
            effects.push(Effect::Release { to: vec![worker], step: self.step });
        }
    }

    fn part(&mut self, worker: usize, state: State) -> Vec<Effect> {
        let mut effects = Vec::new();
        let member = match self.members.get_mut(worker) {
            // A connection that ends after its worker has finished is no death.
            Some(member) if state == State::Finished || member.state == State::Live => member,
            _ => return effects,
        };
        member.state = state;
        member.waiting = false;
        self.end_round(&mut effects);
        if let WhenShort::GoOn { min } = self.rounds.when_short
            && state == State::Dead
            && self.left() < min
        {
            effects.push(Effect::TooFew { left: self.left(), min });
        }
        let finished = self.members.iter().any(|member| member.state == State::Finished);
        if finished && !self.members.iter().any(|member| self.is_awaited(member)) {
            effects.push(Effect::End);
        }
        effects
    }

    /// Applies the round if all gradients are in that it needs and can get.
    fn end_round(&mut self, effects: &mut Vec<Effect>) {
        let possible = self.members.iter().enumerate().map(|(worker, member)| {
            if self.is_awaited(member) { self.share_of(worker) } else { member.given }
        });
        let needed = self.rounds.aggregate.min(possible.sum()).max(1);
        let enough = match self.rounds.when_short {
            WhenShort::Wait => true,
            WhenShort::GoOn { min } => self.left() >= min,
        };
        if !enough || self.shares.len() < needed {
            return;
        }
        for share in &self.shares {
            self.members[share.worker].tally.applied += 1;
        }
        effects.push(Effect::Apply { shares: std::mem::take(&mut self.shares) });
        self.step += 1;
        self.begin_round(effects);
    }

    fn begin_round(&mut self, effects: &mut Vec<Effect>) {
        self.shares.clear();
        let mut to = Vec::new();
        for (worker, member) in self.members.iter_mut().enumerate() {
            member.given = 0;
            if std::mem::take(&mut member.waiting) {
                to.push(worker);
            }
        }
        if !to.is_empty() {
            effects.push(Effect::Release { to, step: self.step });
        }
    }

    /// Gradients a worker gives to each round.
    fn share_of(&self, worker: usize) -> usize {
        let Rounds { workers, aggregate, .. } = self.rounds;
        let dealt = aggregate / workers.max(1) + usize::from(worker < aggregate % workers.max(1));
        if workers >= aggregate { 1 } else { dealt }
    }

    fn is_awaited(&self, member: &Member) -> bool {
        match member.state {
            State::Live => true,
            State::Dead => self.rounds.when_short == WhenShort::Wait,
            State::Finished => false,
        }
    }

    /// Workers that did not die.
    fn left(&self) -> usize {
        self.members.iter().filter(|member| member.state != State::Dead).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn rounds(workers: usize, aggregate: usize) -> Rounds {
        Rounds { workers, aggregate, when_short: WhenShort::GoOn { min: 1 } }
    }

    /// Workers that compute and offer, one event at a time; what a real cluster would do with the effects.
    struct Cluster {
        accumulator: Accumulator,
        /// The step at which each worker computes; `None` while it waits or is away.
        at: Vec<Option<u64>>,
        away: Vec<bool>,
        applied: Vec<Vec<(usize, u64)>>,
        kept: usize,
        ended: bool,
    }

    impl Cluster {
        fn new(workers: usize, aggregate: usize) -> Self {
            let accumulator = Accumulator::new(rounds(workers, aggregate), 0);
            let (at, away) = (vec![Some(0); workers], vec![false; workers]);
            Self { accumulator, at, away, applied: Vec::new(), kept: 0, ended: false }
        }

        /// Carries out effects and checks what must always hold.
        fn carry_out(&mut self, effects: Vec<Effect>) {
            self.ended = false;
            for effect in effects {
                match effect {
                    Effect::Keep { slot } => {
                        assert_eq!(slot, self.kept, "slots are used in turn");
                        self.kept += 1;
                        assert!(self.kept <= self.accumulator.rounds.aggregate);
                    }
                    Effect::Apply { shares } => {
                        assert!(shares.windows(2).all(|w| w[0].worker <= w[1].worker));
                        let mut slots: Vec<_> = shares.iter().map(|s| s.slot).collect();
                        slots.sort_unstable();
                        assert!(slots.into_iter().eq(0..self.kept));
                        self.kept = 0;
                        self.applied.push(shares.iter().map(|s| (s.worker, s.examples)).collect());
                    }
                    Effect::Release { to, step } => {
                        assert_eq!(step, self.applied.len() as u64, "released at the new step");
                        for worker in to {
                            assert!(!self.away[worker] && self.at[worker].is_none());
                            self.at[worker] = Some(step);
                        }
                    }
                    Effect::End => self.ended = true,
                    Effect::Drop { .. } | Effect::TooFew { .. } => {}
                }
            }
        }

        fn offer(&mut self, worker: usize) {
            if let Some(step) = self.at[worker].take() {
                let effects = self.accumulator.offer(worker, step, worker as u64 + 1);
                self.carry_out(effects);
            }
        }
    }

    proptest! {
        /// Whoever is fast: without backups every round has the same gradients in the same order.
        #[test]
        fn the_order_of_arrival_does_not_matter(
            workers in 1usize..6,
            more in 0usize..8,
            picks in prop::collection::vec(0usize..6, 0..200),
        ) {
            let aggregate = workers + more;
            let mut cluster = Cluster::new(workers, aggregate);
            for pick in picks {
                cluster.offer(pick % workers);
            }
            let deal = |w: usize| aggregate / workers + usize::from(w < aggregate % workers);
            let expected: Vec<_> =
                (0..workers).flat_map(|w| vec![(w, w as u64 + 1); deal(w)]).collect();
            prop_assert!(cluster.applied.iter().all(|round| *round == expected));
        }

        /// Workers die, come back and finish at any moment: somebody can always go on, until all are gone.
        #[test]
        fn nobody_waits_for_ever(
            workers in 1usize..6,
            aggregate in 1usize..9,
            events in prop::collection::vec((0usize..6, 0u8..20), 0..200),
        ) {
            let mut cluster = Cluster::new(workers, aggregate);
            for (worker, event) in events {
                let worker = worker % workers;
                match event {
                    0 | 1 => {
                        (cluster.at[worker], cluster.away[worker]) = (None, true);
                        let leaves = event == 0;
                        let effects = if leaves {
                            cluster.accumulator.leave(worker)
                        } else {
                            cluster.accumulator.finish(worker)
                        };
                        cluster.carry_out(effects);
                    }
                    2..6 if cluster.away[worker] => {
                        cluster.away[worker] = false;
                        let effects = cluster.accumulator.join(worker);
                        cluster.carry_out(effects);
                    }
                    _ => cluster.offer(worker),
                }
                let computes = cluster.at.iter().any(Option::is_some);
                prop_assert!(computes || cluster.away.iter().all(|away| *away));
                prop_assert_eq!(cluster.accumulator.step(), cluster.applied.len() as u64);
            }
            for worker in 0..workers {
                cluster.away[worker] = true;
                cluster.at[worker] = None;
                let effects = cluster.accumulator.finish(worker);
                cluster.carry_out(effects);
            }
            prop_assert!(cluster.ended && cluster.kept == 0, "nothing is left over");
        }
    }

    #[test]
    fn a_cluster_without_workers_does_nothing() {
        let mut accumulator = Accumulator::new(rounds(0, 0), 0);
        let stranger = vec![Effect::Drop { worker: 3, why: Why::Stranger }];
        assert_eq!(accumulator.offer(3, 0, 1), stranger);
        assert_eq!(accumulator.join(3), stranger);
        assert_eq!((accumulator.leave(3), accumulator.finish(3)), (vec![], vec![]));
    }
}
