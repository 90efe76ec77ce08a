//! `tftrain run`: a graph that TensorFlow wrote, here or on a server.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use super::exit::Usage;
use super::feeds;
use super::output::{PlacementLog, print};
use super::{gpus, setup};
use crate::cluster::{ClusterSpec, TaskId};
use crate::config::Layers;
use crate::rpc::SessionClient;
use crate::session::proto::*;
use crate::session::{
    Cancellation, Done, Guard, Master, OpError, Peers, Tensor, Worker, codec, read_graph,
};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The graph: .pb, .pbtxt, or a checkpoint's .meta
    #[arg(value_name = "GRAPH")]
    graph: PathBuf,
    /// Where to run it: local, or a server's grpc://HOST:PORT
    #[arg(long, default_value = "local")]
    target: String,
    /// A tensor to replace: a number, a text, nested lists, or @FILE.npy; may be given several times
    #[arg(long = "feed", value_name = "NAME=VALUE")]
    feeds: Vec<String>,
    /// A tensor to print; may be given several times
    #[arg(long = "fetch", value_name = "NAME")]
    fetches: Vec<String>,
    /// An operation to run first, such as an initializer, each in a step of its own; may be given several times
    #[arg(long = "init", value_name = "NAME")]
    inits: Vec<String>,
    /// An operation to run with the fetches, such as a training step; may be given several times
    #[arg(long = "run", value_name = "NAME")]
    runs: Vec<String>,
    /// Steps; the fetches of each are printed
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Write the last step's fetches as NAME_INDEX.npy there, too
    #[arg(long, value_name = "DIR")]
    write: Option<PathBuf>,
    /// Print the device of every node
    #[arg(long)]
    log_device_placement: bool,
    /// Let nodes that want a device that is not there run on another of the same task
    #[arg(long)]
    allow_soft_placement: bool,
    /// Only place the nodes: on the tasks of --config, or on this machine
    #[arg(long, conflicts_with_all = ["feeds", "fetches", "inits", "runs", "write"])]
    dry_run: bool,
    /// The YAML file of the cluster whose tasks a dry run imagines
    #[arg(long, value_name = "FILE", requires = "dry_run")]
    config: Option<PathBuf>,
}

/// Runs or places a graph.
pub(super) fn run(args: &RunArgs) -> Result<u8> {
    let graph = read_graph(&args.graph)?;
    if !args.dry_run && args.fetches.is_empty() && args.runs.is_empty() && args.inits.is_empty() {
        return Err(nothing_asked(&graph).into());
    }
    let feeds = args.feeds.iter().map(|text| feeds::feed(text, &graph));
    let feeds: Vec<(String, Tensor)> = feeds.collect::<Result<_>>()?;
    let target = Target::open(args)?;
    let config = ConfigProto {
        allow_soft_placement: args.allow_soft_placement,
        log_device_placement: args.log_device_placement || args.dry_run,
        ..ConfigProto::default()
    };
    let request = CreateSessionRequest {
        graph_def: Some(graph),
        config: Some(config),
        target: args.target.clone(),
    };
    let handle = target.create(request)?.session_handle;
    if args.dry_run {
        return Ok(0);
    }
    let ended = steps(args, &target, &handle, &feeds);
    let closed = target.close(&handle);
    ended?;
    closed?;
    Ok(0)
}

fn steps(args: &RunArgs, target: &Target, handle: &str, feeds: &[(String, Tensor)]) -> Result<()> {
    let feed: Vec<NamedTensorProto> = feeds
        .iter()
        .map(|(name, tensor)| NamedTensorProto {
            name: full(name),
            tensor: Some(codec::encode(tensor)),
        })
        .collect();
    let step = |fetches: &[String], runs: &[String]| {
        let request = RunStepRequest {
            session_handle: handle.to_owned(),
            feed: feed.clone(),
            fetch: fetches.iter().map(|name| full(name)).collect(),
            target: runs.to_vec(),
            ..RunStepRequest::default()
        };
        target.step(request)
    };
    for init in &args.inits {
        step(&[], std::slice::from_ref(init))?;
    }
    if args.fetches.is_empty() && args.runs.is_empty() {
        return Ok(());
    }
    for index in 0..args.steps {
        let fetched = step(&args.fetches, &args.runs)?;
        for NamedTensorProto { name, tensor } in fetched {
            let tensor = codec::decode(&tensor.unwrap_or_default())?;
            print(&format!("{name} = {}\n", feeds::shown(&tensor)?))?;
            if let (Some(folder), true) = (&args.write, index + 1 == args.steps) {
                write(folder, &name, &tensor)?;
            }
        }
    }
    Ok(())
}

fn write(folder: &Path, name: &str, tensor: &Tensor) -> Result<()> {
    let failed = || format!("cannot make {}", folder.display());
    std::fs::create_dir_all(folder).with_context(failed)?;
    let file = name.replace(['/', ':'], "_");
    feeds::write(&folder.join(format!("{file}.npy")), tensor)
}

/// The name of a tensor: that of a node's first output where none is named.
fn full(name: &str) -> String {
    if name.contains(':') { name.to_owned() } else { format!("{name}:0") }
}

/// Names what could be fetched: nodes that feed no other.
fn nothing_asked(graph: &GraphDef) -> Usage {
    let used: std::collections::HashSet<&str> = graph
        .node
        .iter()
        .flat_map(|node| &node.input)
        .map(|input| input.trim_start_matches('^').split(':').next().unwrap_or_default())
        .collect();
    let ends: Vec<&str> = graph
        .node
        .iter()
        .map(|node| &*node.name)
        .filter(|name| !used.contains(name))
        .take(8)
        .collect();
    Usage(format!(
        "say what to --fetch (a tensor) or --run (an operation), or place the nodes only with --dry-run; \
         the graph ends in {}",
        ends.join(", ")
    ))
}

/// Where a graph runs.
enum Target {
    Local(Box<Master>),
    Server(SessionClient),
}

impl Target {
    fn open(args: &RunArgs) -> Result<Self> {
        if let Some(address) = args.target.strip_prefix("grpc://") {
            if args.dry_run {
                let words = "--dry-run places nodes here; name the server's cluster by --config";
                return Err(Usage(words.to_owned()).into());
            }
            return Ok(Self::Server(SessionClient::connect(address)?));
        }
        if args.target != "local" {
            let words = format!("--target {}: it is local or grpc://HOST:PORT", args.target);
            return Err(Usage(words).into());
        }
        let (spec, gpus) = match &args.config {
            Some(path) => {
                let layers = setup::with_file(Layers::new(None), path)?;
                (layers.resolve()?.config.cluster.jobs, Vec::new())
            }
            None => {
                let here = ClusterSpec::from_lists([("localhost", ["here:1"])])?;
                (here, gpus::all_for_sessions())
            }
        };
        // A session's nodes without a wish go to its master: the first task by job and index.
        let first = spec.all().map(|(task, _)| task).next();
        let task = first.ok_or_else(|| Usage("the cluster has no tasks".to_owned()))?;
        let worker = Arc::new(Worker::new(task, Arc::new(Imagined)).with_gpus(gpus));
        Ok(Self::Local(Box::new(Master::new(worker, spec, Box::new(PlacementLog), Duration::ZERO))))
    }

    fn create(&self, request: CreateSessionRequest) -> Result<CreateSessionResponse> {
        match self {
            Self::Local(master) => Ok(master.create(request, &Cancellation::default())?),
            Self::Server(client) => Ok(client.create(request)?),
        }
    }

    fn step(&self, request: RunStepRequest) -> Result<Vec<NamedTensorProto>> {
        match self {
            Self::Local(master) => {
                Ok(master.session(&request.session_handle)?.begin()?.run(request)?)
            }
            Self::Server(client) => Ok(client.step(request)?),
        }
    }

    fn close(&self, handle: &str) -> Result<()> {
        match self {
            Self::Local(master) => Ok(master.close(handle)?),
            Self::Server(client) => Ok(client.close(handle)?),
        }
    }
}

/// Tasks that are there for placement alone: each has one CPU.
struct Imagined;

fn imagined(task: &TaskId) -> OpError {
    OpError::unavailable(format!("{task} is only imagined"))
}

impl Peers for Imagined {
    fn recv_tensor(
        &self,
        task: &TaskId,
        _: RecvTensorRequest,
        done: Done<RecvTensorResponse>,
    ) -> Guard {
        done(Err(imagined(task)));
        Box::new(())
    }

    fn run_graph(&self, task: &TaskId, _: RunGraphRequest, done: Done<RunGraphResponse>) -> Guard {
        done(Err(imagined(task)));
        Box::new(())
    }

    fn cleanup_graph(&self, _: &TaskId, _: CleanupGraphRequest) {}

    fn get_status(&self, task: &TaskId) -> Result<GetStatusResponse, OpError> {
        let name = format!("/job:{}/replica:0/task:{}/device:CPU:0", task.job, task.index);
        let cpu =
            DeviceAttributes { name, device_type: "CPU".to_owned(), ..DeviceAttributes::default() };
        Ok(GetStatusResponse { device_attributes: vec![cpu] })
    }

    fn create_worker_session(
        &self,
        _: &TaskId,
        _: CreateWorkerSessionRequest,
    ) -> Result<CreateWorkerSessionResponse, OpError> {
        Ok(CreateWorkerSessionResponse::default())
    }

    fn delete_worker_session(&self, _: &TaskId, _: DeleteWorkerSessionRequest) {}

    fn register_graph(
        &self,
        task: &TaskId,
        _: RegisterGraphRequest,
    ) -> Result<RegisterGraphResponse, OpError> {
        Err(imagined(task))
    }

    fn deregister_graph(&self, _: &TaskId, _: DeregisterGraphRequest) {}

    fn cleanup_all(
        &self,
        task: &TaskId,
        _: CleanupAllRequest,
    ) -> Result<CleanupAllResponse, OpError> {
        Err(imagined(task))
    }
}
