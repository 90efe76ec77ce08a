//! [`pieces`]: where a step may be cut, so that gradients are summed while the rest is computed.

use std::ops::Range;

use super::plan::Launch;
use crate::graph::Place;

/// Floats of gradients that are worth a sum of their own: 1 MiB.
const BUCKET: usize = 1 << 18;
/// Floats between two variables are fewer; they are zeros.
const GAP: usize = 16;

/// Launches that follow each other.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Piece {
    pub(super) launches: Range<usize>,
    /// Ranges of the slab of gradients that are final behind them.
    pub(super) ranges: Vec<Range<usize>>,
}

/// A step in pieces, each with a bucket of gradients. A function of the program's gradients and their order alone, so that all
/// towers cut alike.
pub(super) fn pieces(launches: &[Launch]) -> Vec<Piece> {
    let gradients = |launch: &Launch| -> Vec<Range<usize>> {
        let views = launch.outputs.iter().map(|(view, _)| view);
        let views = views.filter(|view| view.place == Place::Gradients);
        views.map(|view| view.offset..view.offset + view.len).collect()
    };
    cut(&launches.iter().map(gradients).collect::<Vec<_>>())
}

/// By the ranges that each launch makes final.
fn cut(made: &[Vec<Range<usize>>]) -> Vec<Piece> {
    let (mut pieces, mut start, mut ranges) = (Vec::new(), 0, Vec::new());
    for (i, own) in made.iter().enumerate() {
        ranges.extend(own.iter().cloned());
        let floats: usize = ranges.iter().map(Range::len).sum();
        let rest: usize = made[i + 1..].iter().flatten().map(Range::len).sum();
        // What comes behind the last gradient belongs to its piece.
        if i + 1 == made.len() || floats >= BUCKET && rest > 0 {
            let ranges = merged(std::mem::take(&mut ranges));
            pieces.push(Piece { launches: start..i + 1, ranges });
            start = i + 1;
        }
    }
    pieces
}

/// Neighbours as one.
fn merged(mut ranges: Vec<Range<usize>>) -> Vec<Range<usize>> {
    ranges.sort_by_key(|range| range.start);
    let mut out: Vec<Range<usize>> = Vec::new();
    for range in ranges {
        match out.last_mut().filter(|last| range.start < last.end + GAP) {
            Some(last) => last.end = range.end,
            None => out.push(range),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(range: Range<usize>) -> Vec<Range<usize>> {
        std::iter::once(range).collect()
    }

    #[test]
    fn a_piece_ends_where_a_bucket_is_full_and_gradients_are_left() {
        let big = BUCKET;
        let none = Vec::new;
        let made = [none(), one(big + 16..2 * big), vec![16..32, 0..10], none(), one(64..big)];
        let launches = |pieces: Vec<Piece>| -> Vec<_> {
            pieces.into_iter().map(|piece| (piece.launches, piece.ranges)).collect()
        };
        // A bucket less 16 is not full.
        let late = vec![(0..3, vec![0..32, big + 16..2 * big]), (3..5, one(64..big))];
        assert_eq!(launches(cut(&made)), late);
        let made = [one(big..2 * big), none(), one(0..10), none()];
        let two = vec![(0..1, one(big..2 * big)), (1..4, one(0..10))];
        assert_eq!(launches(cut(&made)), two);
        assert_eq!(cut(&[one(0..big), none()]).len(), 1);
        assert_eq!(cut(&[]), []);
    }
}
