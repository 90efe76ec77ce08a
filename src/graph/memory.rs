//! The arena plan: where each intermediate lies, so that those never alive together share memory.

/// Floats between the starts of buffers are multiples of this.
const ALIGN: usize = 16;

/// An intermediate: its floats, the step that writes it and the last one that reads it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Buffer {
    pub(crate) len: usize,
    pub(crate) first: usize,
    pub(crate) last: usize,
}

/// The offset of each buffer, and the arena's length in floats.
///
/// Greedy by size: the largest first, each at the lowest offset where it overlaps nobody who is alive at the same time.
pub(crate) fn plan(buffers: &[Buffer]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(buffers[i].len), i));
    let mut offsets = vec![0; buffers.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(buffers.len());
    let mut arena = 0;
    for i in order {
        let buffer = buffers[i];
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(|&&j| buffers[j].first <= buffer.last && buffer.first <= buffers[j].last)
            .map(|&j| (offsets[j], offsets[j] + buffers[j].len.next_multiple_of(ALIGN)))
            .collect();
        taken.sort_unstable();
        let mut at = 0;
        for (start, end) in taken {
            if at + buffer.len <= start {
                break;
            }
            at = at.max(end);
        }
        offsets[i] = at;
        arena = arena.max(at + buffer.len.next_multiple_of(ALIGN));
        placed.push(i);
    }
    (offsets, arena)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn nobody_alive_at_the_same_time_overlaps(
            raw in prop::collection::vec((1usize..200, 0usize..20, 0usize..8), 1..40),
        ) {
            let buffers: Vec<Buffer> = raw
                .iter()
                .map(|&(len, first, life)| Buffer { len, first, last: first + life })
                .collect();
            let (offsets, arena) = plan(&buffers);
            for (i, a) in buffers.iter().enumerate() {
                prop_assert!(offsets[i] + a.len <= arena && offsets[i] % ALIGN == 0);
                for (j, b) in buffers.iter().enumerate().skip(i + 1) {
                    let alive = a.first <= b.last && b.first <= a.last;
                    let apart = offsets[i] + a.len <= offsets[j] || offsets[j] + b.len <= offsets[i];
                    prop_assert!(!alive || apart, "{a:?} {b:?}");
                }
            }
        }
    }
}
