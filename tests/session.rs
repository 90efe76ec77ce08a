//! Sessions without a network: recorded calls of TensorFlow's own client are answered as TensorFlow's servers did, and no
//! mutation of them panics.
//!
//! The recordings (`data/sessions`) are made by `interop/tap.py`.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use bytes::{Buf, Bytes};
use proptest::prelude::*;
use prost::Message;
use tftrain::cluster::{ClusterSpec, TaskId};
use tftrain::session::proto::*;
use tftrain::session::{
    Cancellation, Code, Done, Guard, Master, OpError, Peers, Tensor, Voice, Worker, block_on, codec,
};

use support::sessions::posing;

/// Tasks in one process.
#[derive(Default)]
struct Loopback {
    workers: OnceLock<BTreeMap<TaskId, Arc<Worker>>>,
    /// Parts of graphs that tasks keep for others.
    graphs: AtomicUsize,
}

impl Loopback {
    fn worker(&self, task: &TaskId) -> Arc<Worker> {
        self.workers.get().unwrap()[task].clone()
    }
}

impl Peers for Loopback {
    fn recv_tensor(
        &self,
        task: &TaskId,
        request: RecvTensorRequest,
        done: Done<RecvTensorResponse>,
    ) -> Guard {
        let answer = |tensor: Option<Tensor>| RecvTensorResponse {
            is_dead: tensor.is_none(),
            tensor: tensor.as_ref().map(codec::encode),
            send_start_micros: 0,
        };
        let RecvTensorRequest { step_id, rendezvous_key, .. } = request;
        self.worker(task)
            .receive(step_id, &rendezvous_key, move |arrival| done(arrival.map(answer)));
        Box::new(())
    }

    fn run_graph(
        &self,
        task: &TaskId,
        request: RunGraphRequest,
        done: Done<RunGraphResponse>,
    ) -> Guard {
        let worker = self.worker(task);
        std::thread::spawn(move || {
            let step = worker.step(request.step_id);
            let ran = worker.run_graph(&step, request).and_then(block_on);
            done(ran.map(|recv| RunGraphResponse { recv, ..RunGraphResponse::default() }));
        });
        Box::new(())
    }

    fn cleanup_graph(&self, task: &TaskId, request: CleanupGraphRequest) {
        self.worker(task).cleanup(request.step_id);
    }

    fn get_status(&self, task: &TaskId) -> Result<GetStatusResponse, OpError> {
        Ok(GetStatusResponse { device_attributes: self.worker(task).devices().to_vec() })
    }

    fn create_worker_session(
        &self,
        _: &TaskId,
        _: CreateWorkerSessionRequest,
    ) -> Result<CreateWorkerSessionResponse, OpError> {
        Ok(CreateWorkerSessionResponse {})
    }

    fn delete_worker_session(&self, task: &TaskId, request: DeleteWorkerSessionRequest) {
        self.worker(task).delete_session(&request.session_handle);
    }

    fn register_graph(
        &self,
        task: &TaskId,
        request: RegisterGraphRequest,
    ) -> Result<RegisterGraphResponse, OpError> {
        let graph = request.graph_def.unwrap_or_default();
        let graph_handle = self.worker(task).register(&request.session_handle, &graph)?;
        self.graphs.fetch_add(1, Ordering::Relaxed);
        Ok(RegisterGraphResponse { graph_handle })
    }

    fn deregister_graph(&self, task: &TaskId, request: DeregisterGraphRequest) {
        self.worker(task).deregister(&request.graph_handle);
        self.graphs.fetch_sub(1, Ordering::Relaxed);
    }

    fn cleanup_all(
        &self,
        task: &TaskId,
        request: CleanupAllRequest,
    ) -> Result<CleanupAllResponse, OpError> {
        self.worker(task).reset(&request.container);
        Ok(CleanupAllResponse {})
    }
}

/// Keeps the placement log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<String>>);

impl Voice for Log {
    fn placement(&self, lines: &str) {
        self.0.lock().unwrap().push_str(lines);
    }

    fn note(&self, _: &str) {}
}

/// The article's five tasks; the master is `work:2`, as its client has it.
fn five() -> (Master, Log) {
    let (master, log, _) = five_with(|_| 0);
    (master, log)
}

/// The same with so many GPUs on each task, which are CPUs.
fn five_with(gpus: impl Fn(&TaskId) -> usize) -> (Master, Log, Arc<Loopback>) {
    let tasks = |n: u32, base: u32| (0..n).map(move |i| format!("127.0.0.1:{}", base + i));
    let spec = ClusterSpec::from_lists([("ps", tasks(2, 1)), ("work", tasks(3, 11))]).unwrap();
    let peers = Arc::new(Loopback::default());
    let worker = |task: TaskId| {
        let gpus = (0..gpus(&task)).map(|_| posing().0);
        (task.clone(), Arc::new(Worker::new(task, peers.clone()).with_gpus(gpus)))
    };
    let workers: BTreeMap<_, _> = spec.all().map(|(task, _)| worker(task)).collect();
    assert!(peers.workers.set(workers).is_ok());
    let log = Log::default();
    let own = peers.worker(&TaskId::new("work", 2));
    (Master::new(own, spec, Box::new(log.clone()), Duration::ZERO), log, peers)
}

/// A call that a client made, with the answer it had.
struct Call {
    method: String,
    request: Bytes,
    answer: Bytes,
}

fn recording(name: &str) -> Vec<Call> {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data/sessions").join(name);
    let mut rest = Bytes::from(fs::read(path).unwrap());
    let mut calls = Vec::new();
    while rest.has_remaining() {
        let mut blob = || {
            let len = rest.get_u32_le() as usize;
            rest.split_to(len)
        };
        let method = String::from_utf8(blob().to_vec()).unwrap();
        calls.push(Call { method, request: blob(), answer: blob() });
    }
    calls
}

/// The tensors and the error of a step.
fn outcome(answer: RunStepResponse) -> (i32, Vec<(String, Tensor)>) {
    let tensor = |named: NamedTensorProto| {
        (named.name, codec::decode(&named.tensor.unwrap_or_default()).unwrap())
    };
    (answer.status_code, answer.tensor.into_iter().map(tensor).collect())
}

fn run(master: &Master, request: RunStepRequest) -> Result<RunStepResponse, OpError> {
    let running = master.session(&request.session_handle)?.begin()?;
    Ok(match running.run(request) {
        Ok(tensor) => RunStepResponse { tensor, ..RunStepResponse::default() },
        Err(error) => RunStepResponse {
            status_code: error.code as i32,
            status_error_message: error.message,
            ..RunStepResponse::default()
        },
    })
}

/// Answers recorded calls; each answer must be that of the recording.
fn replay(name: &str) -> String {
    let (master, log) = five();
    let mut handle = String::new();
    let mut version = 0;
    for Call { method, request, answer } in recording(name) {
        match method.rsplit('/').next().unwrap() {
            "CreateSession" => {
                let request = CreateSessionRequest::decode(request).unwrap();
                let created = master.create(request, &Cancellation::default()).unwrap();
                (handle, version) = (created.session_handle, created.graph_version);
            }
            "ExtendSession" => {
                let mut request = ExtendSessionRequest::decode(request).unwrap();
                request.session_handle.clone_from(&handle);
                request.current_graph_version = version;
                version = master.extend(request).unwrap().new_graph_version;
            }
            "RunStep" => {
                let mut request = RunStepRequest::decode(request).unwrap();
                request.session_handle.clone_from(&handle);
                let ours = outcome(run(&master, request).unwrap());
                assert_eq!(ours, outcome(RunStepResponse::decode(answer).unwrap()), "{name}");
            }
            "CloseSession" => master.close(&handle).unwrap(),
            other => panic!("{other} is not replayed"),
        }
    }
    log.0.lock().unwrap().clone()
}

fn expected(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/interop/expected").join(name);
    fs::read_to_string(path).unwrap()
}

#[test]
fn the_articles_client_is_answered() {
    assert_eq!(replay("demo01"), expected("demo01.placement.txt"));
}

#[test]
fn variables_on_two_servers_are_updated() {
    assert_eq!(replay("var"), expected("var.placement.txt"));
    assert_eq!(replay("resvar"), expected("resvar.placement.txt"));
}

#[test]
fn branches_and_feeds() {
    replay("branches");
    replay("fed");
}

fn node(name: &str, op: &str, input: &[&str], device: &str) -> NodeDef {
    let number = |t| AttrValue { value: Some(attr_value::Value::Type(t)) };
    NodeDef {
        name: name.into(),
        op: op.into(),
        input: input.iter().map(|&i| i.into()).collect(),
        device: device.into(),
        attr: [("T", number(1)), ("dtype", number(1))].map(|(k, v)| (k.to_owned(), v)).into(),
        ..NodeDef::default()
    }
}

fn create(master: &Master, node: Vec<NodeDef>) -> Result<String, OpError> {
    let graph_def = Some(GraphDef { node, ..GraphDef::default() });
    let request = CreateSessionRequest { graph_def, ..CreateSessionRequest::default() };
    master.create(request, &Cancellation::default()).map(|created| created.session_handle)
}

fn step(master: &Master, handle: &str, feeds: &[(&str, Tensor)], fetch: &str) -> RunStepResponse {
    let feed = feeds.iter().map(|(name, tensor)| NamedTensorProto {
        name: (*name).into(),
        tensor: Some(codec::encode(tensor)),
    });
    let request = RunStepRequest {
        session_handle: handle.into(),
        feed: feed.collect(),
        fetch: vec![fetch.into()],
        ..RunStepRequest::default()
    };
    run(master, request).unwrap()
}

#[test]
fn what_does_not_fit_is_named() {
    let (master, _) = five();
    let refused = |nodes| create(&master, nodes).unwrap_err();
    let unknown = refused(vec![node("a", "Wurlitzer", &[], "")]);
    assert_eq!(unknown.code, Code::Unimplemented);
    assert!(unknown.message.contains("'Wurlitzer': node {{node a}}"), "{unknown}");
    let missing = refused(vec![node("a", "Identity", &["b"], "")]);
    assert_eq!(missing.message, "Node 'a': Unknown input node 'b'");
    let twice = refused(vec![node("a", "NoOp", &[], ""), node("a", "NoOp", &[], "")]);
    assert!(twice.message.contains("already exists"), "{twice}");
    let nowhere = refused(vec![node("a", "NoOp", &[], "/job:none")]);
    assert!(
        nowhere.message.contains("available devices are [ /job:ps/replica:0/task:0/device:CPU:0, ")
    );
    // A circle is seen when a step needs it.
    let circle = vec![node("a", "Identity", &["b"], ""), node("b", "Identity", &["a"], "")];
    let handle = create(&master, circle).unwrap();
    let answer = step(&master, &handle, &[], "a:0");
    assert!(answer.status_error_message.contains("cycle"), "{answer:?}");
    assert_eq!(master.session("gone").err().unwrap().code, Code::Aborted);
}

#[test]
fn feeds_are_checked_and_cross_tasks() {
    let (master, _) = five();
    let nodes = vec![
        node("x", "Placeholder", &[], "/job:ps/task:0"),
        node("y", "Identity", &["x"], "/job:ps/task:1"),
        node("z", "Identity", &["y", "^x"], "/job:work/task:0"),
    ];
    let handle = create(&master, nodes).unwrap();
    let two = Tensor::scalar(2f32);
    for (feed, fetch) in [("x:0", "z:0"), ("y:0", "z:0"), ("x:0", "x:0"), ("z:0", "z")] {
        let answer = step(&master, &handle, &[(feed, two.clone())], fetch);
        // Where x is not fed, z's control edge still asks for it.
        if feed == "y:0" {
            assert!(answer.status_error_message.contains("You must feed a value"), "{answer:?}");
        } else {
            assert_eq!(outcome(answer).1, [(fetch.to_owned(), two.clone())]);
        }
    }
    let wrong = step(&master, &handle, &[("x:0", Tensor::scalar(2i32))], "z:0");
    assert_eq!(wrong.status_code, Code::InvalidArgument as i32);
    let unknown = step(&master, &handle, &[], "w:0");
    assert!(unknown.status_error_message.starts_with("Tensor w:0"), "{unknown:?}");
}

/// As `tf.cond` reads a resource variable on another task than the condition's.
#[test]
fn a_resource_stays_where_it_is() {
    let (master, log) = five();
    let of = |mut node: NodeDef, number: i32| {
        let number = AttrValue { value: Some(attr_value::Value::Type(number)) };
        node.attr.insert("T".to_owned(), number);
        node
    };
    let nodes = vec![
        node("p", "Placeholder", &[], ""),
        of(node("v", "VarHandleOp", &[], "/job:ps/task:1"), 1),
        of(node("s", "Switch", &["v", "p"], ""), 20),
        of(node("i", "Identity", &["s:1"], ""), 20),
        node("r", "ReadVariableOp", &["i"], ""),
    ];
    let request = CreateSessionRequest {
        graph_def: Some(GraphDef { node: nodes, ..GraphDef::default() }),
        config: Some(ConfigProto { log_device_placement: true, ..ConfigProto::default() }),
        ..CreateSessionRequest::default()
    };
    master.create(request, &Cancellation::default()).unwrap();
    let lines = log.0.lock().unwrap().clone();
    // The condition goes with its only reader.
    assert_eq!(lines.matches("/job:ps/replica:0/task:1").count(), 5, "{lines}");
}

/// A queue of floats on a task, what puts `x` in, and what takes one out.
fn queue(device: &str) -> Vec<NodeDef> {
    let types = attr_value::ListValue { r#type: vec![1], ..Default::default() };
    let types = AttrValue { value: Some(attr_value::Value::List(types)) };
    let mut queue = node("q", "FIFOQueueV2", &[], device);
    queue.attr.insert("component_types".to_owned(), types);
    vec![
        queue,
        node("x", "Placeholder", &[], ""),
        node("in", "QueueEnqueueV2", &["q", "x"], device),
        node("done", "Identity", &["x", "^in"], ""),
        node("out", "QueueDequeueV2", &["q"], device),
        node("twice", "Add", &["out", "out"], ""),
    ]
}

#[test]
fn steps_wait_for_each_other_without_a_thread() {
    let (master, _) = five();
    for device in ["", "/job:ps/task:1"] {
        let handle = create(&master, queue(device)).unwrap();
        std::thread::scope(|scope| {
            let takers: Vec<_> =
                [(); 3].map(|()| scope.spawn(|| step(&master, &handle, &[], "twice:0"))).into();
            for i in 1..=3 {
                let x = Tensor::scalar(i as f32);
                assert_eq!(step(&master, &handle, &[("x:0", x)], "done:0").status_code, 0);
            }
            let taken =
                takers.into_iter().map(|taker| outcome(taker.join().unwrap()).1.remove(0).1);
            let mut taken: Vec<f32> = taken.map(|tensor| tensor.item().unwrap()).collect();
            taken.sort_by(f32::total_cmp);
            assert_eq!(taken, [2.0, 4.0, 6.0]);
        });
        master.close(&handle).unwrap();
    }
}

#[test]
fn a_step_that_waits_ends_with_its_session() {
    let (master, _) = five();
    let handle = create(&master, queue("/job:ps/task:0")).unwrap();
    let running = master.session(&handle).unwrap().begin().unwrap();
    let request = RunStepRequest { fetch: vec!["twice:0".into()], ..RunStepRequest::default() };
    std::thread::scope(|scope| {
        let taker = scope.spawn(|| running.run(request));
        std::thread::sleep(Duration::from_millis(20));
        master.close(&handle).unwrap();
        assert_eq!(taker.join().unwrap().unwrap_err().code, Code::Cancelled);
    });
}

#[test]
fn a_session_keeps_its_last_thousand_plans() {
    let (master, _, peers) = five_with(|_| 0);
    let names: Vec<String> = (0..1010).map(|i| format!("n{i}")).collect();
    let nodes = names.iter().map(|name| node(name, "NoOp", &[], "/job:ps/task:0"));
    let handle = create(&master, nodes.collect()).unwrap();
    // The first is used again and again, and stays.
    for name in names.iter().flat_map(|name| [name, &names[0]]) {
        let before = peers.graphs.load(Ordering::Relaxed);
        let request = RunStepRequest {
            session_handle: handle.clone(),
            target: vec![name.clone()],
            ..RunStepRequest::default()
        };
        assert_eq!(run(&master, request).unwrap().status_code, 0);
        assert!(before < 2 || *name != names[0] || peers.graphs.load(Ordering::Relaxed) == before);
    }
    assert_eq!(peers.graphs.load(Ordering::Relaxed), 1000);
}

#[test]
fn gpus_are_listed_and_used() {
    let (master, log, peers) = five_with(|task| match (&*task.job, task.index) {
        ("work", 0) => 2,
        ("work", 2) => 1,
        _ => 0,
    });
    let device =
        |task: &str, number| format!("/job:work/replica:0/task:{task}/device:GPU:{number}");
    let listed = master.list_devices("", &Cancellation::default()).unwrap();
    let gpus: Vec<_> = listed.iter().filter(|device| device.device_type == "GPU").collect();
    let names: Vec<&str> = gpus.iter().map(|gpu| gpu.name.as_str()).collect();
    assert_eq!(names, [device("2", 0), device("0", 0), device("0", 1)]);
    let words = "device: 0, name: a CPU";
    assert!(
        gpus.iter().all(|gpu| gpu.memory_limit == 1 << 30 && gpu.physical_device_desc == words)
    );
    let mut numbers: Vec<u64> = listed.iter().map(|device| device.incarnation).collect();
    numbers.sort_unstable();
    numbers.dedup();
    assert_eq!(numbers.len(), 8, "each device has a number of its own");

    let nodes = vec![
        node("x", "Placeholder", &[], ""),
        node("near", "Square", &["x"], ""),
        node("far", "Mul", &["near", "x"], "/job:work/task:0"),
        node("there", "Relu", &["far"], "/job:work/task:0/device:GPU:1"),
        node("none", "AddV2", &["there", "near"], "/job:ps"),
    ];
    let config = ConfigProto { log_device_placement: true, ..ConfigProto::default() };
    let graph_def = Some(GraphDef { node: nodes.clone(), ..GraphDef::default() });
    let request = CreateSessionRequest { graph_def, config: Some(config), ..Default::default() };
    let handle = master.create(request, &Cancellation::default()).unwrap().session_handle;
    let lines = log.0.lock().unwrap().clone();
    let places = [
        ("near: (Square)", device("2", 0)),
        ("far: (Mul)", device("0", 0)),
        ("there: (Relu)", device("0", 1)),
        ("none: (AddV2)", "/job:ps/replica:0/task:0/device:CPU:0".to_owned()),
    ];
    for (node, device) in places {
        assert!(lines.contains(&format!("{node}: {device}\n")), "{lines}");
    }
    let two = Tensor::scalar(2f32);
    let answer = step(&master, &handle, &[("x:0", two)], "none:0");
    assert_eq!(outcome(answer).1, [("none:0".to_owned(), Tensor::scalar(12f32))]);

    // A master of TensorFlow's may place there what has no kernel here: tensors lie on the host anyway.
    let at =
        |device: &str| GraphDef { node: vec![node("s", "Sin", &[], device)], ..Default::default() };
    let worker = peers.worker(&TaskId::new("work", 0));
    worker.register("theirs", &at(&device("0", 1))).unwrap();
    let error = worker.register("theirs", &at(&device("0", 2))).unwrap_err();
    assert!(error.message.contains("this task has 2 GPUs"), "{error}");
}

#[test]
fn sessions_leave_nothing_behind() {
    let (master, _) = five();
    for _ in 0..50 {
        let nodes = vec![node("x", "Placeholder", &[], "/job:ps/task:0")];
        let handle = create(&master, nodes).unwrap();
        let session = master.session(&handle).unwrap();
        step(&master, &handle, &[("x:0", Tensor::scalar(1f32))], "x:0");
        master.close(&handle).unwrap();
        assert_eq!(Arc::strong_count(&session), 1);
        assert_eq!(session.begin().err().unwrap().code, Code::Cancelled);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    /// Flipped, cut and doubled recordings are refused or answered, but nothing panics or hangs.
    #[test]
    fn no_request_breaks_the_server(
        name in prop::sample::select(vec!["demo01", "var", "resvar", "branches", "fed"]),
        call in any::<prop::sample::Index>(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        cut in any::<prop::sample::Index>(),
        keep in any::<bool>(),
    ) {
        let (master, _) = five();
        let calls = recording(name);
        let broken = call.index(calls.len());
        let mut handle = String::new();
        for (i, Call { method, request, .. }) in calls.into_iter().enumerate() {
            let mut bytes = request.to_vec();
            if i == broken && !bytes.is_empty() {
                for (at, byte) in &changes {
                    let at = at.index(bytes.len());
                    bytes[at] ^= byte;
                }
                let whole = bytes.len();
                bytes.truncate(if keep { whole } else { cut.index(whole) });
            }
            let bytes = Bytes::from(bytes);
            match method.rsplit('/').next().unwrap() {
                "CreateSession" => {
                    let Ok(request) = CreateSessionRequest::decode(bytes) else { break };
                    let Ok(created) = master.create(request, &Cancellation::default()) else { break };
                    handle = created.session_handle;
                }
                "ExtendSession" => {
                    let Ok(mut request) = ExtendSessionRequest::decode(bytes) else { continue };
                    request.session_handle.clone_from(&handle);
                    let _ = master.extend(request);
                }
                "RunStep" => {
                    let Ok(mut request) = RunStepRequest::decode(bytes) else { continue };
                    request.session_handle.clone_from(&handle);
                    let answer = run(&master, request).unwrap();
                    prop_assert_ne!(answer.status_code, Code::Internal as i32, "{:?}", answer);
                }
                _ => {}
            }
        }
    }
}
