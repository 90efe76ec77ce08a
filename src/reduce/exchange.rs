//! Exchanges as data: who sends which floats to whom, in what order. Nothing here sends, waits or reads a clock.
//!
//! With `N` ranks and `B` bytes of gradients, each rank sends and receives
//!
//! | schedule | bytes each way | rounds of messages | order of the sum |
//! |---|---|---|---|
//! | [`direct`] | `2 (N - 1) / N * B` | 2 | the tree over ranks, `((0 + 1) + (2 + 3)) + 4`, in every range |
//! | [`ring`] | `2 (N - 1) / N * B` | `2 (N - 1)` | along the ring: range `c` as `((c + (c + 1)) + ...) + (c - 1)` |
//!
//! Direct exchange is the default: it waits twice only, and its sums do not depend on where a range lies. The ring
//! speaks with two neighbours only, which pays in large worlds. A range travels in segments, and the next segment is
//! sent before the last is waited for. A link needs room for three messages of each sender, whatever the model's size.

use std::ops::Range;

/// Floats of a segment at most: 256 KiB.
pub const SEGMENT: usize = 1 << 16;

/// Bounds of ranges are multiples of this: a cache line.
const ALIGN: usize = 16;

/// One thing a rank does. Ranges are floats of its two slabs: its own gradients, which stay, and the sums. The tag of a message is
/// unique between two ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Exchange {
    /// Sends a range.
    Send {
        /// The receiver.
        to: usize,
        /// Tag of the message.
        tag: u32,
        /// What is sent.
        range: Range<usize>,
        /// Whether sums are sent, or this rank's own gradients.
        summed: bool,
    },
    /// Receives another rank's values of a range of one's own, beside the slabs.
    Keep {
        /// The sender.
        from: usize,
        /// Tag of the message.
        tag: u32,
        /// What was received.
        range: Range<usize>,
    },
    /// Adds the kept values and one's own as a tree by rank, and divides.
    Sum {
        /// Where the result goes.
        range: Range<usize>,
    },
    /// Receives a range and adds one's own to it.
    Add {
        /// The sender.
        from: usize,
        /// Tag of the message.
        tag: u32,
        /// What was received.
        range: Range<usize>,
    },
    /// Divides a range that holds everybody's sum.
    Divide {
        /// What is divided.
        range: Range<usize>,
    },
    /// Receives a finished range of the sums.
    Receive {
        /// The sender.
        from: usize,
        /// Tag of the message.
        tag: u32,
        /// What was received.
        range: Range<usize>,
    },
}

impl Exchange {
    /// The floats it is about.
    pub fn range(&self) -> &Range<usize> {
        match self {
            Self::Send { range, .. }
            | Self::Keep { range, .. }
            | Self::Sum { range }
            | Self::Add { range, .. }
            | Self::Divide { range }
            | Self::Receive { range, .. } => range,
        }
    }
}

/// The range that `rank` owns. Lower ranks own no less than higher ones.
fn owned(rank: usize, size: usize, len: usize) -> Range<usize> {
    let each = len.div_ceil(size.max(1)).next_multiple_of(ALIGN);
    (rank * each).min(len)..((rank + 1) * each).min(len)
}

/// Segment `k` of a range, empty past its end.
fn piece(range: Range<usize>, segment: usize, k: usize) -> Range<usize> {
    let cut = |k: usize| (range.start + k * segment).min(range.end);
    cut(k)..cut(k + 1)
}

/// Direct exchange: each rank gathers everybody's values of its own range, adds them, and sends the mean back.
///
/// Stage `k` sends segment `k` to its owners, then finishes the own segment `k - 1`, then takes in the others'
/// segments `k - 2`.
pub fn direct(
    rank: usize,
    size: usize,
    len: usize,
    segment: usize,
) -> impl Iterator<Item = Exchange> {
    let segment = segment.max(1);
    let segments = owned(0, size, len).len().div_ceil(segment);
    // Each rank begins with the one after it, so that not all speak to rank 0 first.
    let receivers = move || (1..size).map(move |i| (rank + i) % size);
    let senders = move || (1..size).map(move |i| (rank + size - i) % size);
    let part = move |owner: usize, k: usize| piece(owned(owner, size, len), segment, k);
    (0..segments + 2).flat_map(move |stage| {
        let mut todo = Vec::with_capacity(4 * size);
        let tag = 2 * stage as u32;
        let send = |to, tag, range, summed| Exchange::Send { to, tag, range, summed };
        todo.extend(receivers().map(|to| send(to, tag, part(to, stage), false)));
        if let Some(k) = stage.checked_sub(1) {
            let (tag, own) = (2 * k as u32, || part(rank, k));
            todo.extend(senders().map(|from| Exchange::Keep { from, tag, range: own() }));
            todo.push(Exchange::Sum { range: own() });
            todo.extend(receivers().map(|to| send(to, tag + 1, own(), true)));
        }
        if let Some(k) = stage.checked_sub(2) {
            let tag = 2 * k as u32 + 1;
            todo.extend(senders().map(|from| Exchange::Receive {
                from,
                tag,
                range: part(from, k),
            }));
        }
        todo.into_iter().filter(|exchange| !exchange.range().is_empty())
    })
}

/// The ring: each range goes around once while it is added up, and once more to hand out the mean.
///
/// In step `s` a rank sends range `rank - s` to the next rank and receives range `rank - s - 1` from the one before.
pub fn ring(
    rank: usize,
    size: usize,
    len: usize,
    segment: usize,
) -> impl Iterator<Item = Exchange> {
    let segment = segment.max(1);
    let size = size.max(1);
    let segments = owned(0, size, len).len().div_ceil(segment);
    let (to, from) = ((rank + 1) % size, (rank + size - 1) % size);
    let part = move |step: usize, k: usize| {
        piece(owned((rank + 2 * size - step) % size, size, len), segment, k)
    };
    let alone = (size == 1).then_some(Exchange::Sum { range: 0..len });
    let steps = (0..2 * (size - 1)).flat_map(move |step| {
        (0..=segments).flat_map(move |stage| {
            let mut todo = Vec::with_capacity(3);
            let tag = |k: usize| (step * segments + k) as u32;
            if stage < segments {
                let (tag, range) = (tag(stage), part(step, stage));
                todo.push(Exchange::Send { to, tag, range, summed: step > 0 });
            }
            if let Some(k) = stage.checked_sub(1) {
                let (tag, range) = (tag(k), part(step + 1, k));
                if step + 1 < size {
                    todo.push(Exchange::Add { from, tag, range: range.clone() });
                } else {
                    todo.push(Exchange::Receive { from, tag, range: range.clone() });
                }
                if step + 2 == size {
                    todo.push(Exchange::Divide { range });
                }
            }
            todo
        })
    });
    alone.into_iter().chain(steps).filter(|exchange| !exchange.range().is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    type Schedule = fn(usize, usize, usize, usize) -> Vec<Exchange>;

    const SCHEDULES: [Schedule; 2] =
        [|r, n, l, s| direct(r, n, l, s).collect(), |r, n, l, s| ring(r, n, l, s).collect()];

    /// `(other rank, tag) -> range` of what is sent, or received, by one rank.
    fn messages(todo: &[Exchange], sent: bool) -> HashMap<(usize, u32), Range<usize>> {
        let mut out = HashMap::new();
        for exchange in todo {
            let (peer, tag, range) = match exchange {
                Exchange::Send { to, tag, range, .. } if sent => (to, tag, range),
                Exchange::Keep { from, tag, range }
                | Exchange::Add { from, tag, range }
                | Exchange::Receive { from, tag, range }
                    if !sent =>
                {
                    (from, tag, range)
                }
                _ => continue,
            };
            assert!(out.insert((*peer, *tag), range.clone()).is_none(), "a tag repeats");
        }
        out
    }

    proptest! {
        #[test]
        fn what_is_sent_is_received(size in 1usize..7, len in 0usize..400, segment in 1usize..60) {
            for schedule in SCHEDULES {
                let world: Vec<_> = (0..size).map(|r| schedule(r, size, len, segment)).collect();
                let mut sent = 0;
                for (rank, todo) in world.iter().enumerate() {
                    for ((to, tag), range) in messages(todo, true) {
                        prop_assert!(to != rank && range.len() <= segment && range.end <= len);
                        let received = messages(&world[to], false).remove(&(rank, tag));
                        prop_assert_eq!(received, Some(range));
                        sent += 1;
                    }
                }
                let received: usize = world.iter().map(|todo| messages(todo, false).len()).sum();
                prop_assert_eq!(sent, received);
            }
        }

        /// Every rank comes to its end although a sender must wait while three of its messages lie at the receiver.
        #[test]
        fn little_room_is_enough(size in 1usize..6, len in 0usize..2000, segment in 16usize..200) {
            for schedule in SCHEDULES {
                let world: Vec<_> = (0..size).map(|r| schedule(r, size, len, segment)).collect();
                let mut at = vec![0; size];
                let mut waiting = HashMap::<(usize, usize), Vec<u32>>::new();
                let mut moved = true;
                while std::mem::take(&mut moved) {
                    for rank in 0..size {
                        let done = match world[rank].get(at[rank]) {
                            None => false,
                            Some(Exchange::Send { to, tag, .. }) => {
                                let queue = waiting.entry((rank, *to)).or_default();
                                let room = queue.len() < 3;
                                if room {
                                    queue.push(*tag);
                                }
                                room
                            }
                            Some(Exchange::Keep { from, tag, .. }
                                | Exchange::Add { from, tag, .. }
                                | Exchange::Receive { from, tag, .. }) => {
                                let queue = waiting.entry((*from, rank)).or_default();
                                let found = queue.iter().position(|t| t == tag);
                                found.map(|i| queue.remove(i)).is_some()
                            }
                            Some(Exchange::Sum { .. } | Exchange::Divide { .. }) => true,
                        };
                        at[rank] += usize::from(done);
                        moved |= done;
                    }
                }
                prop_assert!((0..size).all(|rank| at[rank] == world[rank].len()), "stuck at {at:?}");
            }
        }
    }

    #[test]
    fn a_rank_sends_and_receives_its_share() {
        let (size, len) = (4, 64 * 16);
        for schedule in SCHEDULES {
            for rank in 0..size {
                for sent in [true, false] {
                    let todo = schedule(rank, size, len, 50);
                    let floats: usize = messages(&todo, sent).values().map(Range::len).sum();
                    assert_eq!(floats, 2 * (size - 1) * len / size);
                }
            }
        }
    }

    #[test]
    fn the_next_segment_is_sent_before_the_last_is_awaited() {
        let todo: Vec<_> = direct(0, 2, 64, 16).collect();
        let own = |k: usize| 16 * k..16 * k + 16;
        let send = |tag, k, summed| Exchange::Send { to: 1, tag, range: own(k), summed };
        let expected = [
            send(0, 2, false),
            send(2, 3, false),
            Exchange::Keep { from: 1, tag: 0, range: own(0) },
            Exchange::Sum { range: own(0) },
            send(1, 0, true),
            Exchange::Keep { from: 1, tag: 2, range: own(1) },
            Exchange::Sum { range: own(1) },
            send(3, 1, true),
            Exchange::Receive { from: 1, tag: 1, range: own(2) },
            Exchange::Receive { from: 1, tag: 3, range: own(3) },
        ];
        assert_eq!(todo, expected);
    }
}
