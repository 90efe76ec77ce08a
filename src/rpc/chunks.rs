//! Slabs as streams of chunks of at most 1 MiB, and back.

use std::sync::Arc;

use bytes::Bytes;
use tokio_stream::{Stream, StreamExt};
use tonic::Status;

use super::proto::{Chunk, Header};

/// Floats of a chunk: 256 KiB, so that one is read while the next is on its way.
const CHUNK: usize = 1 << 16;

// Slabs travel as they lie in memory, which is the protocol's byte order here.
const _: () = assert!(cfg!(target_endian = "little"), "the wire is little-endian");

/// Floats that streams are views of, and that are written again when no stream is left.
#[derive(Clone, Default)]
pub(super) struct Shared(Arc<Vec<f32>>);

impl Shared {
    /// The floats.
    pub(super) fn floats(&self) -> &[f32] {
        &self.0
    }

    /// Memory for `len` floats, with anything in it.
    pub(super) fn memory(&mut self, len: usize) -> &mut [f32] {
        if Arc::get_mut(&mut self.0).is_none() {
            self.0 = Arc::default();
        }
        let floats = Arc::make_mut(&mut self.0);
        floats.resize(len, 0.0);
        floats
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

/// The stream of a slab.
pub(super) fn split(
    mut header: Header,
    floats: &Shared,
) -> impl Stream<Item = Chunk> + Send + Unpin + use<> {
    let len = floats.0.len();
    header.floats = len as u64;
    let bytes = Bytes::from_owner(floats.clone());
    let pieces = len.div_ceil(CHUNK).max(1);
    let mut header = Some(header);
    tokio_stream::iter((0..pieces).map(move |i| {
        let from = (i * CHUNK * 4).min(bytes.len());
        let to = ((i + 1) * CHUNK * 4).min(bytes.len());
        Chunk { header: header.take(), data: bytes.slice(from..to) }
    }))
}

/// Reads a stream into memory that must be as long as the stream says; `place` gives the memory for the header.
pub(super) async fn join<'a, S>(
    stream: &mut S,
    place: impl FnOnce(&Header) -> Result<&'a mut [f32], Status>,
) -> Result<Header, Status>
where
    S: Stream<Item = Result<Chunk, Status>> + Unpin,
{
    let first =
        stream.next().await.ok_or_else(|| Status::invalid_argument("an empty stream"))??;
    let header = first.header.ok_or_else(|| Status::invalid_argument("a stream without header"))?;
    let into = place(&header)?;
    if into.len() as u64 != header.floats {
        let (got, want) = (header.floats, into.len());
        return Err(Status::invalid_argument(format!("{got} floats announced, {want} expected")));
    }
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(into);
    let mut at = 0;
    let mut data = first.data;
    loop {
        let Some(target) = bytes.get_mut(at..at + data.len()) else {
            return Err(Status::invalid_argument("more floats than announced"));
        };
        target.copy_from_slice(&data);
        at += data.len();
        match stream.next().await {
            Some(chunk) => data = chunk?.data,
            None if at == bytes.len() => return Ok(header),
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
            let mut stream = split(Header::default(), &values.into()).map(Ok);
            join(&mut stream, |_| Ok(&mut out)).await
        })?;
        Ok(out)
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
