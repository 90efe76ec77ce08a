//! [`Early`]: exchanges the buckets of a slab that are final while the rest is still being computed.

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{Builder, JoinHandle};

use super::hosts::{Hosts, Schedule, Share};
use super::{ReduceError, Sink};
use crate::device::DeviceError;
use crate::device::cpu::{Ctx, Isa, reduce::tree_sum};
use crate::util::stats;
use crate::util::trace::Trace;

/// A range of the slab, and copies of its values in each gradient, which the towers go on computing.
struct Bucket {
    range: Range<usize>,
    copies: Vec<Mutex<Vec<f32>>>,
    /// Floats of all copies that towers tell of.
    floats: usize,
    /// Those that are still to come.
    missing: AtomicUsize,
}

/// What the thread is told, in this order: a round begins, buckets are complete, the round ends.
enum Order {
    Trace(Arc<Trace>),
    Begin(Hosts),
    Complete(usize),
    End,
}

/// A round that is over: the first buckets that were exchanged, and whether all went well.
type Ended = (Hosts, usize, Result<(), ReduceError>);

/// A thread that exchanges buckets in their order, each as soon as all its gradients are there.
pub(super) struct Early {
    buckets: Arc<Vec<Bucket>>,
    orders: Option<Sender<Order>>,
    ended: Mutex<Receiver<Ended>>,
    thread: Option<JoinHandle<()>>,
}

impl Early {
    /// For the buckets of `n` gradients with these rows.
    pub(super) fn new(
        buckets: &[Range<usize>],
        rows: &[Range<usize>],
        n: usize,
        schedule: Schedule,
    ) -> Result<Self, DeviceError> {
        let bucket = |range: &Range<usize>| {
            let floats = n * rows.iter().map(|row| shared(range, row).len()).sum::<usize>();
            Bucket {
                range: range.clone(),
                copies: (0..n).map(|_| Mutex::new(vec![0.0; range.len()])).collect(),
                floats,
                missing: AtomicUsize::new(floats),
            }
        };
        let buckets: Arc<Vec<Bucket>> = Arc::new(buckets.iter().map(bucket).collect());
        let (orders, received) = channel();
        let (tell, ended) = channel();
        let worker = Worker { buckets: buckets.clone(), schedule, trace: None, sum: Vec::new() };
        let thread = Builder::new()
            .name("exchange".to_owned())
            .spawn(move || worker.run(&received, &tell))
            .map_err(|error| died(error.to_string()))?;
        Ok(Self { buckets, orders: Some(orders), ended: Mutex::new(ended), thread: Some(thread) })
    }

    fn order(&self, order: Order) {
        if let Some(orders) = &self.orders {
            // A thread that died shows when the round ends.
            let _ = orders.send(order);
        }
    }

    pub(super) fn trace(&self, trace: Arc<Trace>) {
        self.order(Order::Trace(trace));
    }

    pub(super) fn begin(&self, hosts: Hosts) {
        self.order(Order::Begin(hosts));
    }

    /// Waits for the buckets that are complete.
    pub(super) fn end(&self) -> Result<Ended, ReduceError> {
        self.order(Order::End);
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        ended.recv().map_err(|_| died("it ended".to_owned()).into())
    }
}

impl Drop for Early {
    fn drop(&mut self) {
        self.orders = None;
        if let Some(thread) = self.thread.take() {
            // Its end is all that matters.
            let _ = thread.join();
        }
    }
}

/// What two ranges have in common.
fn shared(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = a.start.max(b.start);
    start..a.end.min(b.end).max(start)
}

fn died(reason: String) -> DeviceError {
    DeviceError::Threads { device: "the exchange of gradients".to_owned(), reason }
}

fn lock(copy: &Mutex<Vec<f32>>) -> MutexGuard<'_, Vec<f32>> {
    copy.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Sink for Early {
    fn ready(&self, index: usize, range: Range<usize>, values: &[f32]) {
        for (i, bucket) in self.buckets.iter().enumerate() {
            let Range { start, end } = shared(&bucket.range, &range);
            let Some(copy) = bucket.copies.get(index).filter(|_| start < end) else { continue };
            let at = bucket.range.start;
            lock(copy)[start - at..end - at]
                .copy_from_slice(&values[start - range.start..end - range.start]);
            if bucket.missing.fetch_sub(end - start, Ordering::AcqRel) == end - start {
                bucket.missing.store(bucket.floats, Ordering::Release);
                self.order(Order::Complete(i));
            }
        }
    }
}

/// What the thread has.
struct Worker {
    buckets: Arc<Vec<Bucket>>,
    schedule: Schedule,
    trace: Option<Arc<Trace>>,
    /// Of the bucket at hand, where there are several gradients.
    sum: Vec<f32>,
}

impl Worker {
    fn run(mut self, orders: &Receiver<Order>, ended: &Sender<Ended>) {
        let mut round: Option<Ended> = None;
        let mut complete = vec![false; self.buckets.len()];
        for order in orders {
            match (order, &mut round) {
                (Order::Trace(trace), _) => self.trace = Some(trace),
                (Order::Begin(hosts), _) => round = Some((hosts, 0, Ok(()))),
                (Order::Complete(i), Some((hosts, next, result))) => {
                    complete[i] = true;
                    while result.is_ok() && complete.get(*next) == Some(&true) {
                        *result = self.exchange(hosts, *next);
                        *next += 1;
                    }
                }
                (Order::End, _) => {
                    complete.fill(false);
                    let Some(round) = round.take() else { return };
                    if ended.send(round).is_err() {
                        return;
                    }
                }
                (Order::Complete(_), None) => {}
            }
        }
    }

    fn exchange(&mut self, hosts: &mut Hosts, i: usize) -> Result<(), ReduceError> {
        let Bucket { range, copies, .. } = &self.buckets[i];
        let start = self.trace.as_ref().and_then(|trace| trace.start());
        let copies: Vec<_> = copies.iter().map(lock).collect();
        let own: &[f32] = match &copies[..] {
            [one] => one,
            many => {
                self.sum.resize(range.len(), 0.0);
                let ctx = Ctx { isa: Isa::detect(), threads: 1 };
                tree_sum(ctx, many.len(), |i| &many[i][..], 1.0, &mut self.sum);
                &self.sum
            }
        };
        let share = Share { gradients: copies.len() as f32, losses: 0.0 };
        hosts.exchange(self.schedule, range, own, share)?;
        if let Some(trace) = &self.trace {
            let bytes = stats::bytes(size_of::<f32>() as u64 * range.len() as u64);
            trace.span(start, "exchange", || format!("bucket {i}, {bytes}"));
        }
        Ok(())
    }
}
