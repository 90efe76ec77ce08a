//! Tasks that answer TensorFlow's clients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Result;

use super::cluster_args::ClusterArgs;
use super::exit::{Refused, Usage};
use super::output::{PlacementLog, note, print};
use super::security::security;
use crate::cluster::Place;
use crate::config::RunConfig;
use crate::rpc::{GrpcPeers, Identity, Members, RpcError, Runtime, Server, listen, sessions};
use crate::session::{Gpu, Master, Worker};
use crate::util::clock::Clock;

/// How often a signal is looked for.
const GLANCE: Duration = Duration::from_millis(50);

/// Serves sessions on the CPU and these GPUs until a signal comes.
pub(super) fn serve(
    config: &RunConfig,
    place: &Place,
    gpus: Vec<Gpu>,
    args: &ClusterArgs,
    clock: &dyn Clock,
    signal: &AtomicUsize,
) -> Result<u8> {
    let Place { spec, task, .. } = place;
    place.describe("answers TensorFlow's clients").iter().for_each(|line| note(line));
    let mut security = security(&config.cluster, task)?;
    if security.demands() {
        let text = "TensorFlow's clients can show neither tokens nor certificates: leave both out, and let only those reach the tasks who may use them";
        return Err(Usage(text.to_owned()).into());
    }
    if args.insecure_sessions {
        security = security.exposed();
    }
    let settings = BTreeMap::from([
        ("cluster.jobs".to_owned(), spec.to_string()),
        ("cluster.mode".to_owned(), config.cluster.mode.to_string()),
    ]);
    let incarnation = clock.wall().as_nanos() as u64;
    let identity = Arc::new(Identity { task: task.clone(), incarnation, settings });
    let address = spec.address(task).unwrap_or_default();
    let listener = listen(&identity, address, &security).map_err(|error| match error {
        RpcError::Exposed { task, address } => Refused(format!(
            "{task} would let everybody who reaches {address} run graphs and write files: TensorFlow's protocol knows no \
             passwords; listen on loopback, or say --insecure-sessions where only friends reach it"
        ))
        .into(),
        error => anyhow::Error::from(error),
    })?;
    let runtime = Runtime::in_order()?;
    let peers = Arc::new(GrpcPeers::new(runtime.clone(), spec.clone()));
    let worker = Arc::new(Worker::new(task.clone(), peers).with_gpus(gpus));
    for gpu in worker.devices().iter().filter(|device| !device.physical_device_desc.is_empty()) {
        note(&format!("{} -> {}", gpu.name, gpu.physical_device_desc));
    }
    let patience = Duration::from_secs(args.rendezvous_timeout);
    let master = Master::new(worker.clone(), spec.clone(), Box::new(PlacementLog), patience);
    let services = sessions(Arc::new(master), worker);
    let members = Arc::new(Members::default());
    let server = Server::start(&runtime, listener, identity, &security, members, services)?;
    print(&format!("{task} answers TensorFlow's clients on grpc://{}\n", server.address))?;
    loop {
        match signal.load(Ordering::Relaxed) {
            0 => std::thread::sleep(GLANCE),
            number => return Ok(128 + number as u8),
        }
    }
}
