//! [`Averaging`]: which reducer averages the gradients of a process, and on which devices they lie.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};

use crate::config::{
    ClusterConfig, Engine, Exchange, Reduce, RunConfig, TowerDevices, Wire as WireConfig,
};
use crate::device::cuda::{self, UniqueId};
use crate::device::{Device, DeviceError, Slab};
use crate::graph::VarTable;
use crate::reduce::{
    CollectiveMean, CpuMean, Fellows, GradientReducer, Independent, Link, NcclMean, ReduceError,
    SEGMENT, Topology, Way, Wire,
};

/// Gradients and who averages them.
pub(super) struct Averaging {
    pub(super) reducer: Box<dyn GradientReducer>,
    /// Those of a tower's micro-batches next to each other.
    pub(super) grads: Vec<Slab>,
    /// The reducer in words, for the header.
    pub(super) words: String,
}

/// What a reducer is chosen for.
#[derive(Clone, Copy)]
pub(super) struct Gradients<'a> {
    pub(super) config: &'a RunConfig,
    pub(super) host: &'a Arc<dyn Device>,
    /// The towers' own, where they are in this process and wait for each other.
    pub(super) devices: &'a [Arc<dyn Device>],
    /// Whether every tower has variables of its own, on its device.
    pub(super) own_copies: bool,
    /// Gradients of a step.
    pub(super) count: usize,
    pub(super) table: &'a VarTable,
}

impl Gradients<'_> {
    /// Chooses for one process, or for one of those that `link` connects.
    pub(super) fn average(self, link: Option<Box<dyn Link>>) -> Result<Averaging> {
        match link {
            Some(link) => self.across(link),
            None => self.within(),
        }
    }

    fn within(self) -> Result<Averaging> {
        let one_each = self.own_copies && self.has_gpus();
        match (self.config.reduce, self.devices) {
            (Reduce::None, devices) => {
                let devices = if one_each { devices } else { std::slice::from_ref(self.host) };
                self.on(devices, Box::new(Independent), String::new())
            }
            (_, [gpu]) if one_each && self.config.reduce != Reduce::Nccl => {
                let mean = Box::new(CpuMean::new(gpu.clone()));
                self.on(self.devices, mean, "one tower".to_owned())
            }
            _ => match self.nccl()? {
                Ok((mean, grads)) => {
                    let mean = if self.own_copies { mean } else { self.to_host(mean)? };
                    let reducer = Box::new(mean);
                    Ok(Averaging { reducer, grads, words: "nccl".to_owned() })
                }
                Err(words) => {
                    let mean = Box::new(CpuMean::new(self.host.clone()));
                    self.on(std::slice::from_ref(self.host), mean, words)
                }
            },
        }
    }

    fn across(self, mut link: Box<dyn Link>) -> Result<Averaging> {
        let mut words = "collective".to_owned();
        let engine = self.config.cluster.engine;
        if engine != Engine::Grpc {
            let grads = if self.lack().is_none() { self.alloc(self.devices)? } else { Vec::new() };
            match negotiate(&mut *link, self.offer(&grads))? {
                Ok(Terms { id, firsts, gradients, .. }) => {
                    let (first, workers) = (firsts[link.rank()], firsts.len() - 1);
                    let size = firsts[workers];
                    let id = id.try_into().map(UniqueId);
                    let id = id.map_err(|_| absent("NCCL", "its id is not one".to_owned()))?;
                    let fellows = Some(Fellows { link, id, first, size, gradients });
                    let mean = NcclMean::new(self.devices.to_vec(), &grads, fellows)?;
                    let mean = if self.own_copies { mean } else { self.to_host(mean)? };
                    let words = format!("nccl, {size} GPUs of {workers} workers");
                    return Ok(Averaging { reducer: Box::new(mean), grads, words });
                }
                Err(lack) if engine == Engine::Nccl => {
                    bail!(absent("cluster.engine: nccl", lack))
                }
                Err(lack) if self.has_gpus() => words += &format!(" over gRPC ({lack})"),
                Err(_) => {}
            }
        }
        let (cluster, len) = (&self.config.cluster, self.table.slab_len());
        let rows = self.table.placed().map(|row| row.range()).collect();
        match self.nccl()? {
            Ok((mean, grads)) => {
                words += ", nccl inside this worker";
                let local = Box::new(self.to_host(mean)?.undivided());
                // What lies on GPUs is not told of while it is computed.
                let way = way(cluster, rows, usize::MAX);
                let reducer = Box::new(CollectiveMean::new(local, link, way, self.count, len)?);
                Ok(Averaging { reducer, grads, words })
            }
            Err(_) => {
                let mean = collective(cluster, self.host.clone(), self.count, link, rows, len)?;
                self.on(std::slice::from_ref(self.host), Box::new(mean), words)
            }
        }
    }

    fn on(
        self,
        devices: &[Arc<dyn Device>],
        reducer: Box<dyn GradientReducer>,
        words: String,
    ) -> Result<Averaging> {
        let words = match words.is_empty() {
            true => reducer.name().to_owned(),
            false => words,
        };
        Ok(Averaging { reducer, grads: self.alloc(devices)?, words })
    }

    /// As many on each of the devices.
    fn alloc(self, devices: &[Arc<dyn Device>]) -> Result<Vec<Slab>, DeviceError> {
        let (len, each) = (self.table.slab_len(), self.count.div_ceil(devices.len().max(1)));
        (0..self.count).map(|i| devices[i / each].alloc(len)).collect()
    }

    fn has_gpus(self) -> bool {
        matches!(self.config.towers.devices, TowerDevices::Gpus(_)) && !self.devices.is_empty()
    }

    /// Why NCCL cannot average here; `None` where it can.
    fn lack(self) -> Option<String> {
        match self.config.reduce {
            _ if !self.has_gpus() => {
                Some("there are no GPUs of this process whose gradients meet".to_owned())
            }
            Reduce::Cpu | Reduce::None => Some(format!("reduce is {}", self.config.reduce)),
            Reduce::Auto | Reduce::Nccl => cuda::nccl_lack(),
        }
    }

    /// The mean over the GPUs of this process, with their gradients; or in words who averages in its place.
    fn nccl(self) -> Result<Result<(NcclMean, Vec<Slab>), String>> {
        let strict = match self.config.reduce {
            Reduce::Nccl => true,
            Reduce::Auto if self.has_gpus() && self.devices.len() > 1 => false,
            _ => return Ok(Err(String::new())),
        };
        let mean = || -> Result<_, String> {
            if let Some(lack) = self.lack() {
                return Err(lack);
            }
            let words = |error: &dyn std::error::Error| match error.source() {
                Some(source) => source.to_string(),
                None => error.to_string(),
            };
            let grads = self.alloc(self.devices).map_err(|error| words(&error))?;
            if let Some(lack) = shared_card(&self.cards(&grads)) {
                return Err(lack);
            }
            let mean = NcclMean::new(self.devices.to_vec(), &grads, None);
            mean.map(|mean| (mean, grads)).map_err(|error| words(&error))
        };
        match mean() {
            Err(lack) if strict => {
                bail!(absent("reduce: nccl", format!("{lack}; or use --reduce cpu")))
            }
            Err(lack) => Ok(Err(format!("cpu ({lack})"))),
            Ok(mean) => Ok(Ok(mean)),
        }
    }

    /// The towers' cards.
    fn cards(self, grads: &[Slab]) -> Vec<String> {
        let each = self.count / self.devices.len().max(1);
        grads.iter().step_by(each.max(1)).filter_map(cuda::card_id).collect()
    }

    fn to_host(self, mean: NcclMean) -> Result<NcclMean, DeviceError> {
        mean.on_host(&**self.host, self.table.slab_len())
    }

    /// What this process can bring into a mean over several.
    fn offer(self, grads: &[Slab]) -> Offer {
        let ClusterConfig { wire, engine, ref tls, .. } = self.config.cluster;
        let lack = match wire {
            _ if engine == Engine::Auto && tls.ca.is_some() => {
                Some("cluster.tls is set, and NCCL does not encrypt".to_owned())
            }
            WireConfig::F32 => self.lack(),
            _ => Some(format!("cluster.wire is {wire}")),
        };
        let (cards, towers) = (self.cards(grads), self.devices.len());
        Offer { lack, cards, towers, gradients: self.count }
    }
}

fn absent(asked: &str, reason: String) -> DeviceError {
    DeviceError::Absent { asked: asked.to_owned(), reason }
}

/// That NCCL has at most one rank on each card, where it matters.
fn shared_card(cards: &[String]) -> Option<String> {
    let different = cards.iter().collect::<BTreeSet<_>>().len();
    (different < cards.len())
        .then(|| "two towers share a GPU, which NCCL does not allow".to_owned())
}

/// What a process tells the first one.
#[derive(Serialize, Deserialize)]
struct Offer {
    /// Why it cannot take part.
    lack: Option<String>,
    cards: Vec<String>,
    towers: usize,
    gradients: usize,
}

/// What the first process answers to all.
#[derive(Serialize, Deserialize)]
struct Terms {
    /// Why there is no mean by NCCL.
    lack: Option<String>,
    id: Vec<u8>,
    /// The number of each process's first GPU, and how many there are at the end.
    firsts: Vec<usize>,
    gradients: usize,
}

/// The tag of what is said here. Those of the variables' first values end before it.
const TAG: u64 = u64::MAX;

fn say(link: &mut dyn Link, to: usize, what: &impl Serialize) -> Result<()> {
    let text = serde_json::to_vec(what)?;
    Ok(link.send_with(to, TAG, text.len(), &mut |message| message.copy_from_slice(&text))?)
}

/// Finds out whether NCCL can average over all processes, the same everywhere; else why not.
fn negotiate(link: &mut dyn Link, own: Offer) -> Result<Result<Terms, String>> {
    let terms: Terms = if link.rank() == 0 {
        let mut offers = vec![own];
        for from in 1..link.size() {
            offers.push(serde_json::from_slice(&link.recv_bytes(from, TAG)?)?);
        }
        let terms = terms(&offers);
        (1..link.size()).try_for_each(|to| say(link, to, &terms))?;
        terms
    } else {
        say(link, 0, &own)?;
        serde_json::from_slice(&link.recv_bytes(0, TAG)?)?
    };
    Ok(match terms.lack {
        Some(lack) => Err(lack),
        None => Ok(terms),
    })
}

/// What follows from all offers, by rank.
fn terms(offers: &[Offer]) -> Terms {
    let lack = offers.iter().enumerate().find_map(|(rank, offer)| {
        offer.lack.as_ref().map(|lack| format!("worker of rank {rank}: {lack}"))
    });
    let cards: Vec<String> = offers.iter().flat_map(|offer| offer.cards.clone()).collect();
    let mut firsts = vec![0];
    for offer in offers {
        firsts.push(firsts[firsts.len() - 1] + offer.towers);
    }
    let gradients = offers.iter().map(|offer| offer.gradients).sum();
    let mut terms =
        Terms { lack: lack.or_else(|| shared_card(&cards)), id: Vec::new(), firsts, gradients };
    if terms.lack.is_none() {
        match cuda::unique_id() {
            Ok(UniqueId(id)) => terms.id = id.to_vec(),
            Err(error) => terms.lack = Some(error.to_string()),
        }
    }
    terms
}

/// Floats of a bucket that is exchanged while others are still being computed, at least: 1 MiB.
const BUCKET: usize = 1 << 18;

/// The mean over `n_slabs` gradients of `len` floats, with these rows, here and those of all workers; `host` adds
/// up the ones that are here.
pub fn collective(
    config: &ClusterConfig,
    host: Arc<dyn Device>,
    n_slabs: usize,
    link: Box<dyn Link>,
    rows: Vec<Range<usize>>,
    len: usize,
) -> Result<CollectiveMean, ReduceError> {
    // Larger than everything where nothing may go early.
    let bucket = if config.overlap { BUCKET } else { usize::MAX };
    let way = way(config, rows, bucket);
    CollectiveMean::new(Box::new(CpuMean::undivided(host)), link, way, n_slabs, len)
}

fn way(config: &ClusterConfig, rows: Vec<Range<usize>>, bucket: usize) -> Way {
    let topology = match config.exchange {
        Exchange::Direct => Topology::Direct,
        Exchange::Ring => Topology::Ring,
    };
    let wire = match config.wire {
        WireConfig::F32 => Wire::F32,
        WireConfig::Bf16 => Wire::Bf16,
        WireConfig::F16 => Wire::F16,
    };
    Way { topology, wire, segment: SEGMENT, rows, bucket }
}
