//! `tftrain bench rpc`: a worker's round with a parameter server in another process, beside plain TCP to that process.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::json;

use super::args::RpcBenchArgs;
use super::child::Child;
use super::reduce::{ANYWHERE, spread};
use crate::cli::output::print;
use crate::cli::setup;
use crate::cluster::TaskId;
use crate::config::{DataConfig, RunConfig};
use crate::device::Device;
use crate::device::cpu::CpuDevice;
use crate::model::{Compiled, compile};
use crate::ps::{Accumulator, Mode, Placement, Rounds, Shard, WhenShort, assign};
use crate::rpc::{
    Attendance, Identity, Members, ParameterServer, Peer, RemoteStore, Runtime, Security, Server,
    Timeouts, listen, variables,
};
use crate::store::{Contribution, LocalStore, StateLayout, StoreSettings, VariableStore};
use crate::train::store_settings;
use crate::util::clock::{Clock, SystemClock};
use crate::util::stats::{bytes, median};

/// Exchanges of either kind in a round, and before the first one.
const EXCHANGES: usize = 20;

/// The tutorial network's variables, as both ends know them.
struct Subject {
    compiled: Compiled,
    settings: StoreSettings,
    host: Arc<dyn Device>,
}

impl Subject {
    fn new() -> Result<Self> {
        let config = RunConfig::recipe("cifar10")?;
        let compiled = compile(&*setup::model(&config), 1)?;
        let settings = store_settings(&config, DataConfig::DEFAULT_EXAMPLES as usize, 1);
        Ok(Self { compiled, settings, host: Arc::new(CpuDevice::new(0, 1)?) })
    }

    fn floats(&self) -> usize {
        self.compiled.table().slab_len()
    }

    /// What the one server holds: everything.
    fn ranges(&self) -> Vec<Range<usize>> {
        assign(self.compiled.table(), 1, Placement::Even).concat()
    }
}

fn identity(job: &str, clock: &dyn Clock) -> Arc<Identity> {
    let incarnation = clock.wall().as_nanos() as u64;
    Arc::new(Identity { task: TaskId::new(job, 0), incarnation, settings: BTreeMap::new() })
}

pub(super) fn rpc(args: &RpcBenchArgs) -> Result<u8> {
    let subject = Subject::new()?;
    match args.serve {
        true => serve(subject),
        false => work(args, &subject),
    }
}

/// The other process: a parameter server for one worker, and a plain socket that takes and gives as many bytes.
fn serve(subject: Subject) -> Result<u8> {
    let clock = SystemClock::default();
    let (identity, security) = (identity("ps", &clock), Security::default());
    let plain = TcpListener::bind(ANYWHERE).context("cannot listen")?;
    let plain_address = plain.local_addr().context("a listener without address")?;
    let floats = subject.floats();
    std::thread::spawn(move || echo(&plain, 4 * floats));
    let rounds = Rounds { workers: 1, aggregate: 1, when_short: WhenShort::GoOn { min: 1 } };
    let mode = Mode::Sync(Accumulator::new(rounds, 0));
    let (ranges, settings) = (subject.ranges(), subject.settings.clone());
    let shard = Shard::new(ranges, floats, settings, mode, subject.host)?;
    let members = Arc::new(Members::default());
    let workers = vec![TaskId::new("worker", 0)];
    let parameters =
        ParameterServer::new(shard, true, &subject.settings, u64::MAX, workers, members.clone());
    let runtime = Runtime::start()?;
    let listener = listen(&identity, ANYWHERE, &security)?;
    let services = variables(parameters.clone());
    let server = Server::start(&runtime, listener, identity.clone(), &security, members, services)?;
    print(&format!("{} {plain_address}\n", server.address))?;
    let attendance = Attendance {
        own: &identity.task,
        served: &[TaskId::new("worker", 0)],
        all_needed: true,
        signal: &AtomicUsize::new(0),
        rendezvous: Duration::from_secs(60),
        note: &|_| (),
    };
    let failure = runtime.block_on(parameters.run(attendance));
    Ok(failure.map_or(0, |failure| failure.code))
}

/// Takes `len` bytes and gives as many, until the other end is gone.
fn echo(listener: &TcpListener, len: usize) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; len];
    loop {
        stream.read_exact(&mut buffer)?;
        stream.write_all(&buffer)?;
    }
}

fn work(args: &RpcBenchArgs, subject: &Subject) -> Result<u8> {
    let clock = SystemClock::default();
    let mut child = Child::start(&["bench", "rpc", "--serve"].map(str::to_owned))?;
    let addresses = child.hear()?;
    let Some((address, plain)) = addresses.split_once(' ') else {
        bail!("a server that does not say where it listens: {addresses}");
    };
    let mut plain = TcpStream::connect(plain).context("cannot connect")?;
    plain.set_nodelay(true).context("cannot set TCP_NODELAY")?;
    let runtime = Runtime::start()?;
    let (identity, security) = (identity("worker", &clock), Security::default());
    let (nobody, never) = (|_: &[TaskId]| (), || Ok(()));
    let peers = runtime.block_on(Peer::connect_all(
        &[(TaskId::new("ps", 0), address.to_owned())],
        &identity,
        &security,
        Timeouts::default(),
        &nobody,
        &never,
    ))?;
    let floats = subject.floats();
    let (table, host) = (Arc::new(subject.compiled.table().clone()), &subject.host);
    let shards = peers.iter().map(|peer| (peer.clone(), subject.ranges())).collect();
    let mut store = RemoteStore::new(
        runtime.clone(),
        identity.clone(),
        shards,
        host.alloc(floats)?,
        StateLayout::new(table.clone(), &subject.settings),
        true,
    );
    let mut first = LocalStore::new(table, subject.settings.clone(), vec![host.clone()])?;
    store.restore(&first.snapshot()?)?;

    let gradient = [host.alloc(floats)?];
    let mut buffer = vec![0; 4 * floats];
    let mut exchange = || -> Result<[f64; 3]> {
        let start = clock.monotonic();
        plain.write_all(&buffer).context("cannot send")?;
        plain.read_exact(&mut buffer).context("cannot receive")?;
        let between = clock.monotonic();
        store.pull()?;
        let pulled = clock.monotonic();
        store.apply(&gradient, Contribution { examples: 1, loss: 0.0 })?;
        let end = clock.monotonic();
        Ok([between - start, pulled - between, end - pulled].map(|time| time.as_secs_f64()))
    };
    (0..EXCHANGES).try_for_each(|_| exchange().map(|_| ()))?;
    let mut rounds = Vec::new();
    for _ in 0..args.rounds {
        let times = (0..EXCHANGES).map(|_| exchange()).collect::<Result<Vec<_>>>()?;
        let part = |of: fn(&[f64; 3]) -> f64| median(&times.iter().map(of).collect::<Vec<_>>());
        rounds.push([part(|t| t[0]), part(|t| t[1]), part(|t| t[2]), part(|t| t[1] + t[2])]);
    }
    Peer::leave_all(&runtime, &peers, &identity, None);
    child.finish()?;

    let part = |i: usize| 1e3 * median(&rounds.iter().map(|r| r[i]).collect::<Vec<_>>());
    let (raw, pull, push, round) = (part(0), part(1), part(2), part(3));
    let ratios: Vec<f64> = rounds.iter().map(|r| r[3] / r[0].max(1e-9)).collect();
    let (least, most) = spread(&ratios);
    let ratio = median(&ratios);
    if args.json {
        let result = json!({
            "benchmark": "rpc", "bytes": 4 * floats, "tcp_ms": raw, "pull_ms": pull, "push_ms": push,
            "round_ms": round, "ratio": ratio, "rounds": ratios,
        });
        return print(&format!("{result}\n"));
    }
    print(&format!(
        "{} each way: plain TCP {raw:.3} ms; pull {pull:.3} ms, push with update {push:.3} ms, round {round:.3} ms\n\
         a round takes {ratio:.2} [{least:.2} {most:.2}] times plain TCP\n",
        bytes(4 * floats as u64)
    ))
}
