//! Memory that a task lends to another one on its host: the data of a message then lies there, and the message says where.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use tonic::Status;

use super::bulk::Laden;
use super::channel::Peer;
use super::proto::control_client::ControlClient;
use super::proto::{LendReply, LendRequest, Place};
use crate::cluster::TaskId;
use crate::device::shared::{Borrowed, Pool};

/// What other tasks have lent to this one. A `std::sync::Mutex`, since it is never held across a wait.
#[derive(Default)]
pub(super) struct Lent(Mutex<Vec<(String, Arc<Borrowed>)>>);

impl Lent {
    /// Takes an offer, in place of what the task has lent before.
    pub(super) fn accept(&self, offer: LendRequest) -> Result<LendReply, Status> {
        let unusable = |error: std::io::Error| Status::unavailable(error.to_string());
        let memory = Arc::new(Borrowed::open(&offer.path, offer.inode).map_err(unusable)?);
        let mut lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = lent.iter().position(|(task, _)| *task == offer.task);
        let number = before.unwrap_or(lent.len());
        match before {
            Some(before) => lent[before].1 = memory,
            None => lent.push((offer.task, memory)),
        }
        Ok(LendReply { memory: number as u32 })
    }

    /// A message with its data, wherever that lies.
    pub(super) fn open<M: Laden>(&self, mut message: M) -> Result<M, Status> {
        let Some(Place { memory, slot, len }) = message.place() else { return Ok(message) };
        let lent = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let memory = lent.get(memory as usize);
        let view = memory.and_then(|(_, memory)| memory.view(slot as usize, len as usize));
        let wrong = || Status::invalid_argument("a message whose data is not where it says");
        *message.data() = Bytes::from_owner(view.ok_or_else(wrong)?);
        Ok(message)
    }
}

/// Memory that this task has lent to a peer.
pub(super) struct Loan {
    pool: Pool,
    memory: u32,
}

impl Loan {
    /// Lends memory to a peer on this host. Whether it takes it changes speed only.
    pub(super) async fn to(peer: &Peer, own: &TaskId) -> Option<Self> {
        if !peer.near {
            return None;
        }
        let none = |error: &dyn std::fmt::Display| tracing::info!("nothing lent: {error}");
        let made = Pool::new().and_then(|pool| Ok((pool.inode()?, pool)));
        let (inode, pool) = made.inspect_err(|error| none(error)).ok()?;
        let offer = LendRequest { task: own.to_string(), path: pool.path(), inode };
        let mut control = ControlClient::new(peer.channel.clone());
        let answer = peer.within(control.lend(offer)).await;
        let memory = answer.inspect_err(|error| none(error)).ok()?.into_inner().memory;
        Some(Self { pool, memory })
    }

    /// Has `len` bytes filled for the peer, where there is room now.
    pub(super) fn fill(&mut self, len: usize, write: &mut dyn FnMut(&mut [u8])) -> Option<Place> {
        let slot = self.pool.fill(len, write)?;
        Some(Place { memory: self.memory, slot: slot as u32, len: len as u32 })
    }
}
