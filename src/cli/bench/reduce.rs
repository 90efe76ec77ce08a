//! `tftrain bench reduce`: processes on this machine that take the mean of their gradients as the workers of a collective do.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Result;
use serde_json::json;

use super::args::ReduceBenchArgs;
use super::child::{Child, hear};
use crate::cli::output::print;
use crate::cluster::TaskId;
use crate::config::{ClusterConfig, Exchange, Wire};
use crate::device::cpu::CpuDevice;
use crate::device::{Device, Slab};
use crate::reduce::{CollectiveMean, GradientReducer};
use crate::rpc::{
    GrpcLink, Identity, Inbox, Listener, Members, Peer, Runtime, Security, Server, Timeouts,
    collective, listen,
};
use crate::train;
use crate::util::clock::{Clock, SystemClock};
use crate::util::stats::median;

/// Any free port: nobody else is spoken to.
pub(super) const ANYWHERE: &str = "127.0.0.1:0";

/// Bytes that a round exchanges of each size, and the bounds of how often.
const BYTES: u64 = 64 << 20;
const OFTEN: (u64, u64) = (5, 100);

/// Each process takes the same steps in the same order, so that nothing but gradients needs to be said.
pub(super) fn reduce(args: &ReduceBenchArgs) -> Result<u8> {
    let clock = SystemClock::default();
    let runtime = Runtime::start()?;
    // The first one is of one float: all wait for all.
    let floats: Vec<usize> =
        [1].into_iter().chain(args.sizes.iter().map(|b| (b / 4) as usize)).collect();
    let doors = floats.iter().map(|_| Door::open(args, &clock)).collect::<Result<Vec<_>>>()?;
    let own = doors.iter().map(Door::address).collect();
    let (children, addresses) = meet(args, own)?;
    let mut worlds = Vec::new();
    for (i, (door, floats)) in doors.into_iter().zip(floats).enumerate() {
        let tasks = (0..).zip(addresses.iter().map(|of| of[i].clone()));
        worlds.push(World::join(args, &runtime, door, tasks, floats)?);
    }
    let Some((barrier, worlds)) = worlds.split_first_mut() else { return Ok(0) };
    let mut seconds = vec![Vec::new(); worlds.len()];
    for _ in 0..args.rounds {
        for ((world, bytes), seconds) in worlds.iter_mut().zip(&args.sizes).zip(&mut seconds) {
            world.reduce()?;
            let mut times = Vec::new();
            for _ in 0..(BYTES / bytes).clamp(OFTEN.0, OFTEN.1) {
                barrier.reduce()?;
                let start = clock.monotonic();
                world.reduce()?;
                times.push((clock.monotonic() - start).as_secs_f64());
            }
            seconds.push(median(&times));
        }
    }
    barrier.reduce()?;
    if args.rank == 0 {
        tell(args, &seconds)?;
    }
    children.into_iter().try_for_each(Child::finish)?;
    Ok(0)
}

/// All ranks' addresses, one of each for every size; rank 0 starts the others.
fn meet(args: &ReduceBenchArgs, own: Vec<String>) -> Result<(Vec<Child>, Vec<Vec<String>>)> {
    if args.rank > 0 {
        print(&format!("{}\n", json!(own)))?;
        return Ok((Vec::new(), serde_json::from_str(&hear()?)?));
    }
    let mut children = Vec::new();
    let mut addresses = vec![own];
    for rank in 1..args.ranks {
        let sizes = args.sizes.iter().map(u64::to_string).collect::<Vec<_>>().join(",");
        let flags = format!(
            "bench reduce --rank {rank} --ranks {} --rounds {} --exchange {} --wire {} --sizes {sizes}",
            args.ranks, args.rounds, args.exchange, args.wire,
        );
        let mut child = Child::start(&flags.split(' ').map(str::to_owned).collect::<Vec<_>>())?;
        addresses.push(serde_json::from_str(&child.hear()?)?);
        children.push(child);
    }
    let all = json!(addresses).to_string();
    children.iter_mut().try_for_each(|child| child.tell(&all))?;
    Ok((children, addresses))
}

/// Where a rank listens.
struct Door {
    listener: Listener,
    identity: Identity,
}

impl Door {
    fn open(args: &ReduceBenchArgs, clock: &dyn Clock) -> Result<Self> {
        let task = TaskId::new("worker", args.rank);
        let incarnation = clock.wall().as_nanos() as u64;
        let identity = Identity { task, incarnation, settings: BTreeMap::new() };
        let listener = listen(&identity, ANYWHERE, &Security::default())?;
        Ok(Self { listener, identity })
    }

    fn address(&self) -> String {
        self.listener.address.to_string()
    }
}

/// A rank of a collective over gradients of one size.
struct World {
    mean: CollectiveMean,
    grads: [Slab; 1],
    /// Serves until the end.
    _server: Server,
}

impl World {
    /// Connects to all of `tasks` but the own one.
    fn join(
        args: &ReduceBenchArgs,
        runtime: &Runtime,
        door: Door,
        tasks: impl Iterator<Item = (u32, String)>,
        floats: usize,
    ) -> Result<Self> {
        let (own, security) = (args.rank as usize, Security::default());
        let mut tasks: Vec<(TaskId, String)> =
            tasks.map(|(rank, address)| (TaskId::new("worker", rank), address)).collect();
        let (identity, members) = (Arc::new(door.identity), Arc::new(Members::default()));
        let ranks = tasks.iter().map(|(task, _)| task.clone()).collect();
        let (inbox, ends) = Inbox::new(ranks, members.clone());
        let server = Server::start(
            runtime,
            door.listener,
            identity.clone(),
            &security,
            members.clone(),
            collective(inbox),
        )?;
        tasks.remove(own);
        let (nobody, never) = (|_: &[TaskId]| (), || Ok(()));
        let peers = runtime.block_on(Peer::connect_all(
            &tasks,
            &identity,
            &security,
            Timeouts::default(),
            &nobody,
            &never,
        ))?;
        let link = GrpcLink::open(runtime.clone(), identity, members, own, peers, ends);
        let cluster = ClusterConfig {
            exchange: Exchange::from_name(&args.exchange).unwrap_or(Exchange::Direct),
            wire: Wire::from_name(&args.wire).unwrap_or(Wire::F32),
            ..ClusterConfig::default()
        };
        let host: Arc<dyn Device> = Arc::new(CpuDevice::new(0, 1)?);
        let mut grads = [host.alloc(floats)?];
        grads[0].write(0..floats, &vec![1.0; floats])?;
        let mean = train::collective(&cluster, host, 1, Box::new(link), Vec::new(), floats)?;
        Ok(Self { mean, grads, _server: server })
    }

    fn reduce(&mut self) -> Result<()> {
        Ok(self.mean.reduce(&mut self.grads, Some(&mut 0.0))?)
    }
}

/// The rounds' medians of each size: their median, the least and the most.
fn tell(args: &ReduceBenchArgs, seconds: &[Vec<f64>]) -> Result<u8> {
    let rates = args.sizes.iter().zip(seconds).map(|(&bytes, seconds)| {
        let rate = |s: &f64| bytes as f64 / s.max(1e-9) / 1e9;
        (bytes, 1e3 * median(seconds), seconds.iter().map(rate).collect::<Vec<_>>())
    });
    if args.json {
        let sizes: Vec<_> = rates
            .map(|(bytes, ms, rates)| {
                json!({"bytes": bytes, "median_ms": ms, "gb_per_sec": median(&rates), "rounds": rates})
            })
            .collect();
        let result = json!({
            "benchmark": "reduce", "ranks": args.ranks, "exchange": args.exchange, "wire": args.wire, "sizes": sizes,
        });
        return print(&format!("{result}\n"));
    }
    let head = format!("{} ranks, {}, {}\n", args.ranks, args.exchange, args.wire);
    let lines = rates.map(|(bytes, ms, rates)| {
        let (least, most) = spread(&rates);
        format!("{bytes:>12} B {ms:>9.3} ms {:>7.3} GB/s [{least:.3} {most:.3}]\n", median(&rates))
    });
    print(&(head + &lines.collect::<String>()))
}

/// The least and the most.
pub(super) fn spread(values: &[f64]) -> (f64, f64) {
    values.iter().fold((f64::INFINITY, 0.0), |(least, most), &x| (x.min(least), x.max(most)))
}
