//! [`Link`]: how the ranks of a collective speak, and [`LocalLink`], the one inside a process.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, Sender, channel};

use bytes::Bytes;

use super::{ReduceError, Wire};
use crate::util::rng::{Purpose, Stream};

/// What one rank of a collective sees of the others.
///
/// Messages between two ranks may overtake each other; the tag tells them apart and never repeats.
pub trait Link: Send {
    /// This rank, in `0..size`.
    fn rank(&self) -> usize;
    /// The number of ranks.
    fn size(&self) -> usize;
    /// Hands over a message of `len` bytes, which `write` fills. May wait while three of this rank's messages lie at the receiver,
    /// not before.
    fn send_with(
        &mut self,
        to: usize,
        tag: u64,
        len: usize,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), ReduceError>;
    /// Waits for the message with this tag.
    fn recv_bytes(&mut self, from: usize, tag: u64) -> Result<Bytes, ReduceError>;

    /// Whether all others are still there, as far as is known; for who waits for them in another way than by messages.
    fn glance(&mut self) -> Result<(), ReduceError> {
        Ok(())
    }

    /// Sends floats as they are.
    fn send(&mut self, to: usize, tag: u64, floats: &[f32]) -> Result<(), ReduceError> {
        let bytes: &[u8] = bytemuck::cast_slice(floats);
        self.send_with(to, tag, bytes.len(), &mut |message| message.copy_from_slice(bytes))
    }

    /// Waits for floats that travel as they are.
    fn recv(&mut self, from: usize, tag: u64, into: &mut [f32]) -> Result<(), ReduceError> {
        let message = self.recv_bytes(from, tag)?;
        Wire::F32.expect(from, &message, into.len())?;
        Wire::F32.decode(&message, into);
        Ok(())
    }
}

enum Message {
    Chunk {
        from: usize,
        tag: u64,
        chunk: Bytes,
    },
    /// Rank `from` is gone because rank `cause` is, perhaps itself.
    Gone {
        from: usize,
        cause: usize,
    },
}

/// Ranks of one process, over channels; for tests.
///
/// A rank that is dropped is gone for all others. Who ends because of it passes its name on, so everybody learns
/// which rank went first.
pub struct LocalLink {
    rank: usize,
    peers: Vec<Sender<Message>>,
    inbox: Receiver<Message>,
    /// What came before it was asked for.
    early: HashMap<(usize, u64), Bytes>,
    /// For each rank that is gone, the cause.
    gone: HashMap<usize, usize>,
    /// The first loss this rank met.
    lost: Option<usize>,
    /// Held back, to be sent in another order.
    outbox: Vec<(usize, Message)>,
    disorder: Option<Stream>,
}

impl LocalLink {
    /// `n` ranks whose messages arrive in order.
    pub fn world(n: usize) -> Vec<Self> {
        Self::connect(n, |_| None)
    }

    /// `n` ranks whose messages are delayed and reordered: each is held back for as long as its sender does not wait
    /// itself, then sent in any order. A function of the seed for each rank.
    pub fn disorderly_world(n: usize, seed: u64) -> Vec<Self> {
        Self::connect(n, |rank| Some(Stream::new(seed, Purpose::Test, rank as u64)))
    }

    fn connect(n: usize, disorder: impl Fn(usize) -> Option<Stream>) -> Vec<Self> {
        let (peers, inboxes): (Vec<_>, Vec<_>) = (0..n).map(|_| channel()).unzip();
        let link = |(rank, inbox)| Self {
            rank,
            peers: peers.clone(),
            inbox,
            early: HashMap::new(),
            gone: HashMap::new(),
            lost: None,
            outbox: Vec::new(),
            disorder: disorder(rank),
        };
        inboxes.into_iter().enumerate().map(link).collect()
    }

    /// Whether the receiver is gone, and why, is learned when something is awaited from it.
    fn post(&self, to: usize, message: Message) {
        if let Some(peer) = self.peers.get(to) {
            peer.send(message).ok();
        }
    }

    /// Sends one of the held messages, any of them.
    fn post_one(&mut self) {
        let held = self.outbox.len() as u32;
        let pick = self.disorder.as_mut().map_or(0, |stream| stream.below(held) as usize);
        let (to, message) = self.outbox.swap_remove(pick);
        self.post(to, message);
    }

    /// Tosses whether messages are held back now.
    fn holds(&mut self) -> bool {
        self.disorder.as_mut().is_some_and(|stream| stream.below(2) == 0)
    }

    fn flush(&mut self) {
        while !self.outbox.is_empty() {
            self.post_one();
        }
    }

    fn lose(&mut self, rank: usize) -> ReduceError {
        let rank = *self.lost.get_or_insert(rank);
        ReduceError::PeerLost { rank, reason: "it ended".to_owned() }
    }
}

impl Link for LocalLink {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn send_with(
        &mut self,
        to: usize,
        tag: u64,
        len: usize,
        write: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), ReduceError> {
        let mut chunk = vec![0; len];
        write(&mut chunk);
        let message = Message::Chunk { from: self.rank, tag, chunk: chunk.into() };
        self.outbox.push((to, message));
        while !self.outbox.is_empty() && !self.holds() {
            self.post_one();
        }
        Ok(())
    }

    fn recv_bytes(&mut self, from: usize, tag: u64) -> Result<Bytes, ReduceError> {
        self.flush();
        loop {
            if let Some(chunk) = self.early.remove(&(from, tag)) {
                return Ok(chunk);
            }
            if let Some(&cause) = self.gone.get(&from) {
                return Err(self.lose(cause));
            }
            match self.inbox.recv() {
                Ok(Message::Chunk { from, tag, chunk }) => {
                    self.early.insert((from, tag), chunk);
                }
                Ok(Message::Gone { from, cause }) => {
                    self.gone.insert(from, cause);
                }
                Err(_) => return Err(self.lose(from)),
            }
        }
    }
}

impl Drop for LocalLink {
    fn drop(&mut self) {
        self.flush();
        let cause = self.lost.unwrap_or(self.rank);
        for to in (0..self.peers.len()).filter(|&to| to != self.rank) {
            self.post(to, Message::Gone { from: self.rank, cause });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_told_apart_by_their_tags() {
        for mut world in [LocalLink::world(2), LocalLink::disorderly_world(2, 3)] {
            let mut b = world.pop().unwrap();
            let mut a = world.pop().unwrap();
            let sender = std::thread::spawn(move || {
                (0..40).for_each(|tag| a.send(1, tag, &[tag as f32]).unwrap());
            });
            for tag in (0..40).rev() {
                let mut got = [0.0];
                b.recv(0, tag, &mut got).unwrap();
                assert_eq!(got, [tag as f32]);
            }
            sender.join().unwrap();
            assert!(matches!(b.recv(0, 99, &mut []), Err(ReduceError::PeerLost { rank: 0, .. })));
        }
    }

    #[test]
    fn a_wrong_length_names_both() {
        let mut world = LocalLink::world(2);
        world[0].send(1, 7, &[1.0, 2.0]).unwrap();
        let error = world[1].recv(0, 7, &mut [0.0]).unwrap_err();
        let text = "rank 0 sent 2 floats in place of 1; give every task the same model";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn everybody_learns_who_went_first() {
        let mut world = LocalLink::world(3);
        let mut c = world.pop().unwrap();
        let mut b = world.pop().unwrap();
        drop(world);
        assert!(matches!(b.recv(0, 0, &mut []), Err(ReduceError::PeerLost { rank: 0, .. })));
        drop(b);
        assert!(matches!(c.recv(1, 0, &mut []), Err(ReduceError::PeerLost { rank: 0, .. })));
    }
}
