//! Towers on tasks that only serve: [`TowerServer`] has them, [`RemoteTower`] is a client's stub for one.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Mutex, OwnedMutexGuard};
use tokio_stream::{Stream, StreamExt};
use tonic::{Request, Response, Status, Streaming};

use super::bulk::{self, Bulk, Nothing};
use super::channel::Peer;
use super::chunks::{self, Shared};
use super::control::Identity;
use super::error::stopped;
use super::proto::towers_client::TowersClient;
use super::proto::towers_server::Towers;
use super::proto::{ActivationsRequest, Chunk, Header};
use super::security::Line;
use super::{RpcError, Runtime};
use crate::cluster::{DeviceKind, DeviceName, TaskId};
use crate::data::Batch;
use crate::device::{DeviceError, Done, Slab};
use crate::tower::{Batches, Tower, TowerError};

/// The exit code of a run whose device failed.
const DEVICE: u8 = 9;

/// What one call of a tower takes and gives, in floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TowerSizes {
    /// The slab of the variables, and of the gradients.
    pub slab: usize,
    /// Features of a micro-batch.
    pub features: usize,
    /// Labels of a micro-batch.
    pub labels: usize,
}

/// A tower and the memory of one call.
struct Served {
    tower: Box<dyn Tower>,
    /// As it came: variables, features, labels.
    packed: Vec<f32>,
    variables: Slab,
    batch: Batch,
    gradients: Slab,
    losses: Vec<f32>,
    /// The gradients on their way back.
    answer: Shared,
}

impl Served {
    fn compute(&mut self, observe: bool) -> Result<(), TowerError> {
        let (variables, batch) = self.packed.split_at(self.variables.len());
        let (features, labels) = batch.split_at(self.batch.features.len());
        self.variables.write(0..variables.len(), variables)?;
        self.batch.features.copy_from_slice(features);
        self.batch.labels.copy_from_slice(labels);
        let Self { tower, variables, batch, gradients, losses, .. } = self;
        tower.gradients(variables, Batches::only(batch), observe, gradients, &mut |_, _| ())?;
        losses.clear();
        tower.losses(losses)?;
        let len = self.gradients.len();
        Ok(self.gradients.read(0..len, self.answer.memory(len))?)
    }
}

/// The towers of a task that only serves. A tower works for one call at a time.
pub struct TowerServer {
    own: TaskId,
    towers: Vec<Arc<Mutex<Served>>>,
    served: AtomicU64,
}

impl TowerServer {
    /// Serves `towers`, all of the same sizes.
    pub fn new(
        own: TaskId,
        towers: Vec<Box<dyn Tower>>,
        sizes: TowerSizes,
    ) -> Result<Arc<Self>, DeviceError> {
        let slab = || {
            let device = "the host".to_owned();
            let bytes = size_of::<f32>() * sizes.slab;
            Slab::host(sizes.slab).ok_or(DeviceError::OutOfMemory { device, bytes })
        };
        let served = |tower| {
            let batch =
                Batch { features: vec![0.0; sizes.features], labels: vec![0.0; sizes.labels] };
            Ok(Arc::new(Mutex::new(Served {
                tower,
                packed: vec![0.0; sizes.slab + sizes.features + sizes.labels],
                variables: slab()?,
                batch,
                gradients: slab()?,
                losses: Vec::new(),
                answer: Shared::default(),
            })))
        };
        let towers = towers.into_iter().map(served).collect::<Result<_, DeviceError>>()?;
        Ok(Arc::new(Self { own, towers, served: AtomicU64::new(0) }))
    }

    /// Micro-batches so far.
    pub fn served(&self) -> u64 {
        self.served.load(Ordering::Relaxed)
    }

    fn tower(&self, index: u32) -> Result<OwnedMutexGuard<Served>, Status> {
        let own = &self.own;
        let tower = self.towers.get(index as usize).ok_or_else(|| {
            Status::invalid_argument(format!("{own} has {} towers, not {index}", self.towers.len()))
        })?;
        let busy = |_| Status::failed_precondition(format!("tower {index} of {own} is at work"));
        tower.clone().try_lock_owned().map_err(busy)
    }

    /// A tower's work on a thread that may block; its failure stops the run.
    async fn work<T: Send + 'static>(
        &self,
        mut tower: OwnedMutexGuard<Served>,
        work: impl FnOnce(&mut Served) -> Result<T, TowerError> + Send + 'static,
    ) -> Result<(T, OwnedMutexGuard<Served>), Status> {
        let done = tokio::task::spawn_blocking(move || (work(&mut tower), tower)).await;
        let (result, tower) = done.map_err(|_| Status::internal("a tower's thread died"))?;
        let failed = |error: TowerError| stopped(&self.own.to_string(), DEVICE, &error.to_string());
        Ok((result.map_err(failed)?, tower))
    }
}

type Chunks = Pin<Box<dyn Stream<Item = Result<Chunk, Status>> + Send>>;

#[tonic::async_trait]
impl Towers for Arc<TowerServer> {
    type GradientsStream = Nothing<Result<Chunk, Status>>;

    async fn gradients(
        &self,
        mut request: Request<Streaming<Chunk>>,
    ) -> Result<Response<Self::GradientsStream>, Status> {
        let mut stream = bulk::received(request.extensions_mut());
        let mut held = None;
        let asked = chunks::join(&mut stream, |header| {
            Ok(vec![&mut held.insert(self.tower(header.tower)?).packed[..]])
        });
        let observe = asked.await?.observe;
        let tower = held.ok_or_else(|| Status::internal("a tower is held for its batch"))?;
        let ((), tower) = self.work(tower, move |tower| tower.compute(observe)).await?;
        self.served.fetch_add(1, Ordering::Relaxed);
        let header = Header { losses: tower.losses.clone(), ..Header::default() };
        Ok(bulk::reply(chunks::split(header, vec![tower.answer.bytes()])))
    }

    type ActivationsStream = Chunks;

    async fn activations(
        &self,
        request: Request<ActivationsRequest>,
    ) -> Result<Response<Chunks>, Status> {
        let tower = self.tower(request.into_inner().tower)?;
        let (layers, _) = self.work(tower, |tower| tower.tower.activations()).await?;
        let chunked = |(name, values): (String, Vec<f32>)| {
            chunks::split(Header { name, ..Header::default() }, vec![Shared::from(values).bytes()])
        };
        let pieces: Vec<_> = layers.into_iter().map(chunked).collect();
        let all = pieces.into_iter().fold(Box::pin(tokio_stream::empty()) as Chunks, |all, one| {
            Box::pin(all.chain(one.map(Ok)))
        });
        Ok(Response::new(all))
    }
}

/// A tower on another task. Variables and batch go there with every micro-batch, gradient and losses come back.
pub struct RemoteTower {
    runtime: Runtime,
    identity: Arc<Identity>,
    peer: Peer,
    client: TowersClient<Bulk<Line>>,
    index: u32,
    device: DeviceName,
    packed: Shared,
    /// Those that nobody has asked for.
    losses: Vec<f32>,
}

impl RemoteTower {
    /// Tower `index` of a connected task.
    pub fn new(runtime: Runtime, identity: Arc<Identity>, peer: Peer, index: u32) -> Self {
        let task = DeviceName {
            job: Some(peer.task.job.clone()),
            task: Some(peer.task.index),
            ..DeviceName::default()
        };
        let device = DeviceName::local(DeviceKind::Cpu, index).merged(&task);
        let client = TowersClient::new(Bulk(peer.channel.clone()));
        let (packed, losses) = (Shared::default(), Vec::new());
        Self { runtime, identity, peer, client, index, device, packed, losses }
    }
}

/// A tower's error that keeps its cause.
fn remote(error: RpcError) -> TowerError {
    TowerError::Remote(Box::new(error))
}

impl Tower for RemoteTower {
    fn device(&self) -> &DeviceName {
        &self.device
    }

    fn describe(&self) -> String {
        "served by another task".to_owned()
    }

    fn gradients(
        &mut self,
        variables: &Slab,
        batches: Batches<'_>,
        observe: bool,
        into: &mut Slab,
        done: Done<'_>,
    ) -> Result<(), TowerError> {
        let in_host = "the variables and gradients of a client are in the host's memory";
        let on_host = || DeviceError::Mismatch {
            device: self.device.to_string(),
            reason: in_host.to_owned(),
        };
        let into = into.as_host_mut().ok_or_else(on_host)?;
        let parts =
            [variables.as_host().ok_or_else(on_host)?, &batches.now.features, &batches.now.labels];
        let mut packed = self.packed.memory(parts.iter().map(|part| part.len()).sum());
        for part in parts {
            let (own, rest) = packed.split_at_mut(part.len());
            own.copy_from_slice(part);
            packed = rest;
        }
        let task = self.identity.task.to_string();
        let header = Header { task, tower: self.index, observe, ..Header::default() };
        let request = chunks::split(header, vec![self.packed.bytes()]);
        let client = &mut self.client;
        let call = async {
            let mut answer = client.gradients(bulk::request(request)).await?;
            let mut answer = bulk::received(answer.extensions_mut());
            chunks::join(&mut answer, |_| Ok(vec![&mut *into])).await
        };
        let header = self.runtime.block_on(self.peer.within(call)).map_err(remote)?;
        self.losses.extend(header.losses);
        done(0..into.len(), into);
        Ok(())
    }

    fn losses(&mut self, into: &mut Vec<f32>) -> Result<(), TowerError> {
        into.append(&mut self.losses);
        Ok(())
    }

    fn activations(&mut self) -> Result<Vec<(String, Vec<f32>)>, TowerError> {
        let (client, tower) = (&mut self.client, self.index);
        let call = async {
            let mut answer = client.activations(ActivationsRequest { tower }).await?.into_inner();
            let mut layers: Vec<(String, Vec<f32>)> = Vec::new();
            while let Some(Chunk { header, data, .. }) = answer.message().await? {
                if let Some(header) = header {
                    layers.push((header.name, Vec::new()));
                }
                let layer = layers.last_mut();
                let (_, values) = layer.ok_or_else(|| Status::invalid_argument("no header"))?;
                // A message's bytes lie anywhere, floats do not.
                values.extend(data.chunks_exact(4).map(bytemuck::pod_read_unaligned::<f32>));
            }
            Ok(layers)
        };
        self.runtime.block_on(self.peer.within(call)).map_err(remote)
    }
}
