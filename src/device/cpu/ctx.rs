//! [`Ctx`]: where and how wide a kernel runs.

use super::Isa;

/// Floats per piece of an elementwise kernel: large against the cost of handing it to a thread.
const GRAIN: usize = 1 << 14;

/// Handed to every kernel. With more than one thread, kernels use the rayon pool they are called in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ctx {
    /// Instruction set.
    pub isa: Isa,
    /// Threads of the pool; 1 keeps a kernel on its caller.
    pub threads: usize,
}

impl Ctx {
    /// Calls `job(i, ..)` for each `i` in `0..parts` with piece `i` of every slice.
    ///
    /// Each slice comes with the length of its pieces; the last pieces may be shorter, or empty.
    pub(crate) fn each<const N: usize, const M: usize>(
        self,
        parts: usize,
        ins: [(&[f32], usize); N],
        outs: [(&mut [f32], usize); M],
        job: impl Fn(usize, [&[f32]; N], [&mut [f32]; M]) + Sync,
    ) {
        if parts > 0 {
            self.halve(0, parts, ins, outs, &job);
        }
    }

    fn halve<const N: usize, const M: usize>(
        self,
        first: usize,
        parts: usize,
        ins: [(&[f32], usize); N],
        outs: [(&mut [f32], usize); M],
        job: &(impl Fn(usize, [&[f32]; N], [&mut [f32]; M]) + Sync),
    ) {
        if parts == 1 {
            return job(first, ins.map(|(s, _)| s), outs.map(|(s, _)| s));
        }
        let left = parts / 2;
        let cut = |len: usize, unit: usize| (left * unit).min(len);
        let ins_right = ins.map(|(s, unit)| (&s[cut(s.len(), unit)..], unit));
        let ins = ins.map(|(s, unit)| (&s[..cut(s.len(), unit)], unit));
        let mut outs_right: [(&mut [f32], usize); M] = std::array::from_fn(|_| (&mut [][..], 0));
        let mut rights = outs_right.iter_mut();
        let outs = outs.map(|(s, unit)| {
            let (l, r) = s.split_at_mut(cut(s.len(), unit));
            if let Some(right) = rights.next() {
                *right = (r, unit);
            }
            (l, unit)
        });
        let go_left = || self.halve(first, left, ins, outs, job);
        let go_right = || self.halve(first + left, parts - left, ins_right, outs_right, job);
        if self.threads > 1 {
            rayon::join(go_left, go_right);
        } else {
            go_left();
            go_right();
        }
    }

    /// Calls `job` on pieces of slices of one length, cut at multiples of `row`. For results that do not depend on
    /// the cuts: how many there are depends on the number of threads.
    pub(crate) fn map<const N: usize, const M: usize>(
        self,
        row: usize,
        ins: [&[f32]; N],
        outs: [&mut [f32]; M],
        job: impl Fn([&[f32]; N], [&mut [f32]; M]) + Sync,
    ) {
        let len = outs.first().map_or(0, |s| s.len());
        assert!(row > 0 && len.is_multiple_of(row), "{len} floats are not rows of {row}");
        assert!(
            ins.iter().all(|s| s.len() == len) && outs.iter().all(|s| s.len() == len),
            "lengths differ"
        );
        let unit = self.grain(len, row);
        let parts = len.div_ceil(unit);
        self.each(parts, ins.map(|s| (s, unit)), outs.map(|s| (s, unit)), |_, i, o| job(i, o));
    }

    /// Floats per piece of `len` floats in rows of `row`: all of them where threads would not pay.
    pub(crate) fn grain(self, len: usize, row: usize) -> usize {
        if self.threads > 1 && len > 2 * GRAIN { GRAIN.div_ceil(row) * row } else { len.max(row) }
    }

    /// Into how many runs `n` pictures are split: some more than threads, so that they end together, but few, as each has its own
    /// scratch memory to bring into the caches.
    pub(crate) fn groups(self, n: usize) -> usize {
        let wanted = if self.threads > 1 { (2 * self.threads).min(n).max(1) } else { 1 };
        n.div_ceil(n.div_ceil(wanted).max(1)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_slices_in_order() {
        for threads in [1, 3] {
            let ctx = Ctx { isa: Isa::Portable, threads };
            let input: Vec<f32> = (0..10).map(|i| i as f32).collect();
            let (mut out, mut index) = (vec![0.0; 10], vec![0.0; 4]);
            ctx.each(4, [(&input, 3)], [(&mut out, 3), (&mut index, 1)], |i, [a], [o, at]| {
                o.iter_mut().zip(a).for_each(|(o, a)| *o = 2.0 * a);
                at[0] = i as f32;
            });
            assert_eq!(out, input.iter().map(|v| 2.0 * v).collect::<Vec<_>>());
            assert_eq!(index, [0.0, 1.0, 2.0, 3.0]);
        }
    }

    #[test]
    fn groups_are_never_empty() {
        for (threads, n) in [(1, 128), (2, 128), (2, 9), (3, 1), (2, 0)] {
            let ctx = Ctx { isa: Isa::Portable, threads };
            let groups = ctx.groups(n);
            assert!(groups >= 1 && (groups - 1) * n.div_ceil(groups) < n.max(1), "{threads} {n}");
        }
    }
}
