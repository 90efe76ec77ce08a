//! Slabs as streams of chunks of at most 1 MiB, and back.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

use super::lent::Loan;
use super::proto::{Chunk, Header};
use crate::device::{DeviceError, Slab};

/// Floats of a chunk: 256 KiB, so that one is read while the next is on its way.
const CHUNK: usize = 1 << 16;

// Slabs travel as they lie in memory, which is the protocol's byte order here.
const _: () = assert!(cfg!(target_endian = "little"), "the wire is little-endian");

/// Floats that streams are views of, and that are written again when no stream is left.
#[derive(Clone, Default)]
pub(super) struct Shared(Arc<Vec<f32>>);

impl Shared {
    /// Memory for `len` floats, with anything in it.
    pub(super) fn memory(&mut self, len: usize) -> &mut [f32] {
        if Arc::get_mut(&mut self.0).is_none() {
            self.0 = Arc::default();
        }
        let floats = Arc::make_mut(&mut self.0);
        floats.resize(len, 0.0);
        floats
    }

    /// A view of them.
    pub(super) fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }
}

impl From<Vec<f32>> for Shared {
    fn from(floats: Vec<f32>) -> Self {
        Self(Arc::new(floats))
    }
}

impl AsRef<[u8]> for Shared {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}

/// A view of a slab in the host's memory.
pub(super) fn bytes(slab: Arc<Slab>) -> Bytes {
    struct Viewed(Arc<Slab>);
    impl AsRef<[u8]> for Viewed {
        fn as_ref(&self) -> &[u8] {
            bytemuck::cast_slice(self.0.as_host().unwrap_or_default())
        }
    }
    Bytes::from_owner(Viewed(slab))
}

/// The floats of `ranges` of a slab, one after the other, from the `at`th of them on.
fn read(
    slab: &Slab,
    ranges: &[Range<usize>],
    at: usize,
    into: &mut [f32],
) -> Result<(), DeviceError> {
    let (mut before, mut filled) = (0, 0);
    for range in ranges {
        let start = range.start + (at + filled).saturating_sub(before).min(range.len());
        let len = (range.end - start).min(into.len() - filled);
        slab.read(start..start + len, &mut into[filled..filled + len])?;
        (before, filled) = (before + range.len(), filled + len);
    }
    Ok(())
}

/// Chunks of the floats of `ranges` of a slab, in lent memory as far as there is room.
pub(super) fn lend(
    header: Header,
    slab: &Slab,
    ranges: &[Range<usize>],
    loan: &mut Loan,
) -> Result<Vec<Chunk>, DeviceError> {
    let floats: usize = ranges.iter().map(Range::len).sum();
    let mut header = Some(Header { floats: floats as u64, ..header });
    let mut failed = Ok(());
    let starts = (0..floats.max(1)).step_by(CHUNK);
    let chunks = starts.map(|at| {
        let len = (floats - at).min(CHUNK);
        let mut write = |bytes: &mut [u8]| {
            let read = read(slab, ranges, at, bytemuck::cast_slice_mut(bytes));
            failed = std::mem::replace(&mut failed, Ok(())).and(read);
        };
        let bytes = len * size_of::<f32>();
        let place = loan.fill(bytes, &mut write);
        let mut data = vec![0.0f32; if place.is_some() { 0 } else { len }];
        if place.is_none() {
            write(bytemuck::cast_slice_mut(&mut data));
        }
        Chunk { header: header.take(), data: Shared::from(data).bytes(), place }
    });
    let chunks = chunks.collect();
    failed.map(|()| chunks)
}

/// Chunks of floats that lie in several places.
pub(super) fn cut(
    mut header: Header,
    mut parts: Vec<Bytes>,
) -> impl Iterator<Item = Chunk> + Send + use<> {
    header.floats = parts.iter().map(|part| (part.len() / size_of::<f32>()) as u64).sum();
    let mut header = Some(header);
    parts.retain(|part| !part.is_empty());
    // Nothing at all is announced too.
    let nothing = parts.is_empty().then(Bytes::new);
    let pieces = parts.into_iter().flat_map(|part| {
        let starts = (0..part.len()).step_by(4 * CHUNK);
        starts.map(move |at| part.slice(at..(at + 4 * CHUNK).min(part.len())))
    });
    let chunk = move |data| Chunk { header: header.take(), data, place: None };
    nothing.into_iter().chain(pieces).map(chunk)
}

/// The same as a stream.
pub(super) fn split(
    header: Header,
    parts: Vec<Bytes>,
) -> impl Stream<Item = Chunk> + Send + Unpin + use<> {
    tokio_stream::iter(cut(header, parts))
}

/// Reads a stream into memory that must be as long in all as the stream says; `place` gives the memory for the header.
pub(super) async fn join<'a, S>(
    stream: &mut S,
    place: impl FnOnce(&Header) -> Result<Vec<&'a mut [f32]>, Status>,
) -> Result<Header, Status>
where
    S: Stream<Item = Result<Chunk, Status>> + Unpin,
{
    let first =
        stream.next().await.ok_or_else(|| Status::invalid_argument("an empty stream"))??;
    let header = first.header.ok_or_else(|| Status::invalid_argument("a stream without header"))?;
    let parts = place(&header)?;
    let want: usize = parts.iter().map(|part| part.len()).sum();
    if want as u64 != header.floats {
        let got = header.floats;
        return Err(Status::invalid_argument(format!("{got} floats announced, {want} expected")));
    }
    let mut parts = parts.into_iter().map(bytemuck::cast_slice_mut::<f32, u8>);
    let mut room: &mut [u8] = &mut [];
    let mut data = first.data;
    loop {
        while !data.is_empty() {
            if room.is_empty() {
                let more = || Status::invalid_argument("more floats than announced");
                room = parts.next().ok_or_else(more)?;
                continue;
            }
            let piece = data.split_to(data.len().min(room.len()));
            let (target, rest) = room.split_at_mut(piece.len());
            target.copy_from_slice(&piece);
            room = rest;
        }
        match stream.next().await {
            Some(chunk) => data = chunk?.data,
            None if room.is_empty() && parts.all(|part| part.is_empty()) => return Ok(header),
            None => return Err(Status::invalid_argument("fewer floats than announced")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(len: usize, into: usize) -> Result<Vec<f32>, Status> {
        let values: Vec<f32> = (0..len).map(|i| i as f32).collect();
        let mut out = vec![0.0; into];
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (one, other) = values.split_at(len / 3);
            let (one, other) = (Shared::from(one.to_vec()), Shared::from(other.to_vec()));
            let mut stream = split(Header::default(), vec![one.bytes(), other.bytes()]).map(Ok);
            let (one, other) = out.split_at_mut(into / 2);
            join(&mut stream, |_| Ok(vec![one, other])).await
        })?;
        Ok(out)
    }

    #[test]
    fn ranges_are_read_from_anywhere() {
        let mut slab = Slab::host(20).unwrap();
        slab.write(0..20, &(0..20).map(|i| i as f32).collect::<Vec<_>>()).unwrap();
        let ranges = [3..5, 9..9, 10..16, 18..20];
        let packed: Vec<f32> = ranges.iter().cloned().flatten().map(|i| i as f32).collect();
        for at in 0..packed.len() {
            for len in 0..=packed.len() - at {
                let mut found = vec![0.0; len];
                read(&slab, &ranges, at, &mut found).unwrap();
                assert_eq!(found, packed[at..at + len]);
            }
        }
    }

    #[test]
    fn any_length_passes() {
        for len in [0, 1, CHUNK, CHUNK + 1, 3 * CHUNK - 7] {
            let out = round_trip(len, len).unwrap();
            assert!(out.iter().enumerate().all(|(i, v)| *v == i as f32), "{len}");
        }
        assert!(round_trip(9, 8).is_err() && round_trip(8, 9).is_err());
    }
}
