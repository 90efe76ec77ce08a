//! [`Losses`]: what the towers' losses were. A GPU keeps them for some steps, so that nobody has to wait for each of them.

use anyhow::{Context, Result, ensure};

use crate::tower::Tower;

/// The losses of all towers.
pub(super) struct Losses {
    /// Every tower reports these, the total first.
    names: Vec<String>,
    /// Micro-batches of a tower in a step.
    n_micro: usize,
    /// For each tower those of the steps that were last read, by step, micro-batch and name.
    rows: Vec<Vec<f32>>,
    /// Steps that were computed and not read.
    unread: usize,
    /// Steps that may be.
    most: usize,
    /// Means over all micro-batches of the last step that was read, by name.
    means: Vec<f64>,
    /// Total losses of steps that are read and not in the average yet.
    totals: Vec<f64>,
    average: f64,
}

/// A total loss that is not a number.
pub(super) struct NotANumber {
    pub(super) loss: f32,
    /// The tower's place in this process, and its micro-batch.
    pub(super) tower: usize,
    pub(super) micro_batch: usize,
    /// Steps that were computed since.
    pub(super) ago: usize,
}

impl Losses {
    /// For so many towers and micro-batches of each; `most` steps in a row need not be read.
    pub(super) fn new(names: Vec<String>, n_towers: usize, n_micro: usize, most: usize) -> Self {
        Self {
            n_micro,
            rows: vec![Vec::new(); n_towers],
            unread: 0,
            most,
            means: vec![0.0; names.len()],
            totals: Vec::new(),
            average: 0.0,
            names,
        }
    }

    /// Whether there are steps that were not read.
    pub(super) fn are_unread(&self) -> bool {
        self.unread > 0
    }

    /// Whether the next step has to be read.
    pub(super) fn are_due(&self) -> bool {
        self.unread >= self.most
    }

    /// A step is computed.
    pub(super) fn add(&mut self) {
        self.unread += 1;
    }

    /// Waits for the steps that were not read yet, and reads them; the first loss that is not a number, where there is one.
    pub(super) fn read(
        &mut self,
        towers: &mut [Box<dyn Tower>],
        first_tower: usize,
    ) -> Result<Option<NotANumber>> {
        let (steps, n_losses) = (std::mem::take(&mut self.unread), self.names.len());
        let each = self.n_micro * n_losses;
        for (i, (tower, rows)) in towers.iter_mut().zip(&mut self.rows).enumerate() {
            let name = || format!("tower_{}", first_tower + i);
            rows.clear();
            tower.losses(rows).with_context(name)?;
            let (told, due) = (rows.len(), steps * each);
            ensure!(told == due, "{} told of {told} losses in place of {due}", name());
        }
        for step in 0..steps {
            let micro_batches = self.rows.iter().enumerate().flat_map(|(i, rows)| {
                rows[step * each..][..each].chunks(n_losses).map(move |r| (i, r))
            });
            for (n, (tower, losses)) in micro_batches.clone().enumerate() {
                if !losses[0].is_finite() {
                    let (loss, ago) = (losses[0], steps - 1 - step);
                    return Ok(Some(NotANumber { loss, tower, micro_batch: n, ago }));
                }
            }
            for (i, mean) in self.means.iter_mut().enumerate() {
                let sum: f64 = micro_batches.clone().map(|(_, losses)| f64::from(losses[i])).sum();
                *mean = sum / (self.rows.len() * self.n_micro) as f64;
            }
            self.totals.push(self.means[0]);
        }
        Ok(None)
    }

    /// The total loss of the last step that was read.
    pub(super) fn total(&self) -> f64 {
        self.means[0]
    }

    /// Takes what was read into the average; `last` is the total of the last step over all workers.
    pub(super) fn count(&mut self, last: f64) {
        if let Some(total) = self.totals.last_mut() {
            *total = last;
        }
        for total in self.totals.drain(..) {
            self.average = 0.9 * self.average + 0.1 * total;
        }
    }

    /// The total with decay 0.9, from 0 at the start of this process and without correction, as the tutorial's summaries.
    pub(super) fn average(&self) -> f64 {
        self.average
    }

    /// The means of the last step that was read, by name, the total first.
    pub(super) fn means(&self) -> impl Iterator<Item = (&str, f64)> {
        self.names.iter().map(String::as_str).zip(self.means.iter().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{DeviceKind, DeviceName};
    use crate::device::{Done, Slab};
    use crate::tower::{Batches, TowerError};

    /// Tells what it is given.
    struct Teller(DeviceName, Vec<f32>);

    impl Tower for Teller {
        fn device(&self) -> &DeviceName {
            &self.0
        }

        fn describe(&self) -> String {
            String::new()
        }

        fn gradients(
            &mut self,
            _: &Slab,
            _: Batches<'_>,
            _: bool,
            _: &mut Slab,
            _: Done<'_>,
        ) -> Result<(), TowerError> {
            Ok(())
        }

        fn losses(&mut self, into: &mut Vec<f32>) -> Result<(), TowerError> {
            into.append(&mut self.1);
            Ok(())
        }

        fn activations(&mut self) -> Result<Vec<(String, Vec<f32>)>, TowerError> {
            Ok(Vec::new())
        }
    }

    fn towers(losses: [&[f32]; 2]) -> Vec<Box<dyn Tower>> {
        let name = DeviceName::local(DeviceKind::Cpu, 0);
        losses.map(|own| Box::new(Teller(name.clone(), own.to_vec())) as Box<dyn Tower>).into()
    }

    #[test]
    fn steps_that_are_read_late_count_as_if_each_had_been_read() {
        let names = || vec!["total_loss".to_owned(), "part".to_owned()];
        let mut late = Losses::new(names(), 2, 1, 2);
        assert!(!late.are_due() && !late.are_unread());
        late.add();
        assert!(!late.are_due() && late.are_unread());
        late.add();
        late.add();
        assert!(late.are_due());
        let all: [&[f32]; 2] =
            [&[1.0, 10.0, 2.0, 20.0, 3.0, 30.0], &[3.0, 0.0, 4.0, 0.0, 5.0, 0.0]];
        assert!(late.read(&mut towers(all), 0).unwrap().is_none());
        late.count(late.total());
        assert_eq!(late.means().collect::<Vec<_>>(), [("total_loss", 4.0), ("part", 15.0)]);

        let mut each = Losses::new(names(), 2, 1, 0);
        for step in 0..3 {
            each.add();
            let own = all.map(|tower| &tower[2 * step..][..2]);
            assert!(each.read(&mut towers(own), 0).unwrap().is_none());
            each.count(each.total());
        }
        assert_eq!(each.average(), late.average());
        assert!((late.average() - (0.81 * 0.2 + 0.9 * 0.3 + 0.4)).abs() < 1e-12);
    }

    #[test]
    fn the_first_loss_that_is_no_number_is_told_with_its_place() {
        let mut losses = Losses::new(vec!["total_loss".to_owned()], 2, 2, 9);
        (0..3).for_each(|_| losses.add());
        // Step, then micro-batch: the second tower's first of the second step.
        let all: [&[f32]; 2] = [&[1.0; 6], &[1.0, 1.0, f32::NAN, 1.0, f32::INFINITY, 1.0]];
        let bad = losses.read(&mut towers(all), 0).unwrap().unwrap();
        assert!(bad.loss.is_nan());
        assert_eq!((bad.tower, bad.micro_batch, bad.ago), (1, 2, 1));
        losses.add();
        let error = losses.read(&mut towers([&[1.0, 1.0], &[1.0]]), 4).err().unwrap();
        assert_eq!(error.to_string(), "tower_5 told of 1 losses in place of 2");
    }
}
