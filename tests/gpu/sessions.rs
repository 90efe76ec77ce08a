//! Graphs of TensorFlow's clients on GPUs.

use std::fs;
use std::sync::Arc;

use tftrain::device::cuda;
use tftrain::session::{Gpu, Node, OpError, Tensor, ops, proto};

use crate::cli::{Ended, Space, ports};
use crate::fake::{inside, on_gpus, real};
use crate::support::sessions::{agree_with_tensorflow, compute};
use crate::training::{Env, run};

const CPU: &str = "/job:localhost/replica:0/task:0/device:CPU:0";
/// A number follows.
const GPU: &str = "/job:localhost/replica:0/task:0/device:GPU:";

fn gpu() -> Arc<Gpu> {
    Arc::new(Gpu::cuda(0, 0, &cuda::probe().gpus.unwrap()[0]))
}

fn kernel(node: &Node<'_>, gpu: &Arc<Gpu>) -> Result<ops::Kernel, OpError> {
    let op = ops::find(node.op()).unwrap();
    ops::on_gpu(node, (op.build)(node)?, gpu)
}

#[test]
fn kernels_give_tensorflows_values() {
    inside("sessions::kernels_give_tensorflows_values", &[], || {
        let gpu = gpu();
        let words = gpu.description();
        assert!(
            words.starts_with("device: 0, name: ") && words.contains(", pci bus id: "),
            "{words}"
        );
        assert!(words.contains(", compute capability: "), "{words}");
        // The second time recorded work is replayed.
        for _ in 0..3 {
            agree_with_tensorflow(|node| Some(kernel(node, &gpu)));
        }
    });
}

/// More shapes than there is memory for, and a tensor that no card has room for.
#[test]
fn programs_that_were_not_used_for_long_go() {
    let few = [("FAKE_CUDA_MEMORY", "100000000")];
    inside("sessions::programs_that_were_not_used_for_long_go", &few, || {
        let gpu = gpu();
        let float = proto::AttrValue { value: Some(proto::attr_value::Value::Type(1)) };
        let attr = [("T".to_owned(), float)].into();
        let node = proto::NodeDef { op: "Square".to_owned(), attr, ..Default::default() };
        let square = kernel(&Node::new(&node), &gpu).unwrap();
        for n in (1..40).map(|i| 100_000 * i) {
            let x = Tensor::full([n], 3f32).unwrap();
            let y = compute(&square, vec![x], 1).unwrap().remove(0);
            assert!(y.slice::<f32>().unwrap().iter().all(|&y| y == 9.0), "{n}");
        }
        if real() {
            return;
        }
        let error = compute(&square, vec![Tensor::full([1 << 25], 3f32).unwrap()], 1).unwrap_err();
        assert_eq!(error.code, tftrain::session::Code::ResourceExhausted, "{error}");
        assert!(
            error.message.starts_with("OOM when allocating 2") && !error.message.contains("batch"),
            "{error}"
        );
        // What is small goes on.
        compute(&square, vec![Tensor::full([10], 3f32).unwrap()], 1).unwrap();
    });
}

/// `product = x w` on DEVICE, `y = sin(product)` on OTHER, and a variable on DEVICE.
const GRAPH: &str = r#"
    node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } }
    node { name: "w" op: "Const" attr { key: "dtype" value { type: DT_FLOAT } }
           attr { key: "value" value { tensor { dtype: DT_FLOAT tensor_shape { dim { size: 2 } dim { size: 2 } }
                                                float_val: 1 float_val: 2 float_val: 3 float_val: 4 } } } }
    node { name: "product" op: "MatMul" device: "DEVICE" input: "x" input: "w" attr { key: "T" value { type: DT_FLOAT } } }
    node { name: "y" op: "Sin" device: "OTHER" input: "product" attr { key: "T" value { type: DT_FLOAT } } }
    node { name: "v" op: "VariableV2" device: "DEVICE" attr { key: "dtype" value { type: DT_FLOAT } }
           attr { key: "shape" value { shape { dim { size: 2 } dim { size: 2 } } } } }
    node { name: "begin" op: "Assign" input: "v" input: "w" attr { key: "T" value { type: DT_FLOAT } } }
    node { name: "twice" op: "AssignAdd" input: "v" input: "product" attr { key: "T" value { type: DT_FLOAT } } }
    versions { producer: 2474 }
"#;

fn space(device: &str, other: &str) -> Space {
    let space = Space::new();
    let graph = GRAPH.replace("DEVICE", device).replace("OTHER", other);
    fs::write(space.path("g.pbtxt"), graph).unwrap();
    space
}

/// Runs the graph; `None` where the stand-in cannot be built.
fn ran(space: &Space, flags: &str, env: Env<'_>) -> Option<Ended> {
    run(space, &format!("run g.pbtxt --feed x=[[1,0],[0,2]] {flags}"), env)
}

const PRODUCT: &str = "product:0 = [[1, 2],\n [6, 8]]\n";

#[test]
fn nodes_go_where_they_have_kernels() {
    let on_gpu = |out: &str, number: usize, node: &str| {
        assert!(out.contains(&format!("{node}: {GPU}{number}\n")), "{out}");
    };
    let space_open = space("", "");
    let flags = "--fetch product --fetch y --log-device-placement";
    let Some(ended) = ran(&space_open, flags, &[]) else { return };
    let out = ended.code(0).out;
    assert!(out.contains(PRODUCT), "{out}");
    ["x: (Placeholder)", "product: (MatMul)"].iter().for_each(|node| on_gpu(&out, 0, node));
    for node in ["w: (Const)", "y: (Sin)", "v: (VariableV2)", "twice: (AssignAdd)"] {
        assert!(out.contains(&format!("{node}: {CPU}\n")), "{out}");
    }
    // What is asked for there, is there, with all that must be beside it.
    let space = space("/gpu:1", "");
    let two = [("FAKE_CUDA_DEVICES", "2")];
    let flags = "--init begin --fetch twice --fetch product --log-device-placement";
    let Some(ended) = ran(&space, flags, &two) else { return };
    let out = ended.code(0).out;
    assert!(out.contains("twice:0 = [[2, 4],\n [9, 12]]\n") && out.contains(PRODUCT), "{out}");
    ["product: (MatMul)", "v: (VariableV2)", "begin: (Assign)", "twice: (AssignAdd)"]
        .iter()
        .for_each(|node| on_gpu(&out, 1, node));
}

#[test]
fn what_has_no_kernel_or_no_gpu_is_refused_in_tensorflows_words() {
    let space = space("", "/device:GPU:0");
    let Some(ended) = ran(&space, "--fetch y", &[]) else { return };
    ended.code(2).says(&[
        "Cannot assign a device for operation y: Could not satisfy explicit device specification '/device:GPU:0' because no supported \
         kernel for GPU devices is available.\nColocation Debug Info:\n",
        "\nSin: CPU\n",
        "\n  y (Sin) /device:GPU:0\n\n\t [[y]]",
    ]);
    let soft = ran(&space, "--fetch y --allow-soft-placement --log-device-placement", &[])
        .unwrap()
        .code(0)
        .out;
    assert!(soft.contains(&format!("y: (Sin): {CPU}\n")), "{soft}");
    // The group of a variable goes together.
    let beside = GRAPH.replace("DEVICE", "/gpu:0").replace("OTHER", "").replace(
        r#"input: "product" attr"#,
        r#"input: "product" attr { key: "_class" value { list { s: "loc:@v" } } } attr"#,
    );
    fs::write(space.path("g.pbtxt"), beside).unwrap();
    ran(&space, "--fetch y", &[]).unwrap().code(2).says(&[
        "because the node {{colocation_node y}} was colocated with a group of nodes that required incompatible device '/device:GPU:0'.",
        "\nSin: CPU\nVariableV2: GPU CPU\n",
    ]);
    let missing = self::space("/gpu:99", "");
    let ended = ran(&missing, "--fetch y", &[]).unwrap().code(2);
    let available = format!("assigned to /gpu:99 but available devices are [ {CPU}, {GPU}0");
    let ended = ended.says(&["{{node product}} was explicitly", &available]);
    assert!(!ended.err.contains("CUDA is not enabled"), "{}", ended.err);
    let none = [("CUDA_VISIBLE_DEVICES", "")];
    if !real() {
        let ended = ran(&missing, "--fetch y", &none).unwrap().code(2);
        let ended =
            ended.says(&["The requested device appears to be a GPU, but CUDA is not enabled.\n"]);
        assert!(!ended.err.contains("WARNING"), "{}", ended.err);
    }
}

#[test]
fn failures_of_gpus_are_those_of_the_node() {
    if real() {
        return;
    }
    let space = space("", "");
    let fails = |env: Env<'_>| ran(&space, "--fetch product", env);
    let Some(ended) = fails(&[("FAKE_CUDA_FAIL", "alloc:1:2")]) else { return };
    assert_ne!(ended.code, 0);
    ended.says(&["OOM when allocating", "[[{{node product}}]]"]);
    let ended = fails(&[("FAKE_CUDA_FAIL", "sync:1:719")]).unwrap();
    assert_ne!(ended.code, 0);
    ended.says(&["CUDA_ERROR_LAUNCH_FAILED", "[[{{node product}}]]"]);
    let ended = fails(&[("FAKE_CUDA_DRIVER_VERSION", "11040")]).unwrap().code(0);
    let ended = ended.says(&["WARNING: graphs run on the CPU", "CUDA 11.4"]);
    assert_eq!(ended.out, PRODUCT);
}

#[test]
fn a_graph_uses_the_gpus_of_other_tasks() {
    let space = space("/job:work/task:1/device:GPU:0", "/job:ps/task:0");
    let [ps, first, second] = ports(3)[..] else { panic!() };
    let cluster = format!(
        "cluster: {{mode: session, ps: [\"127.0.0.1:{ps}\"], work: [\"127.0.0.1:{first}\", \"127.0.0.1:{second}\"]}}\n"
    );
    fs::write(space.path("c.yaml"), cluster).unwrap();
    let start = |flags: &str, on_gpu: bool| {
        let mut command = space.command(&format!("serve --config c.yaml {flags}"));
        if on_gpu {
            on_gpus(&mut command, 1, &[])?;
            command.env("XDG_CACHE_HOME", space.path("cache"));
        }
        Some(space.spawn(&mut command))
    };
    let _ps = start("--job-name ps --task-index 0", false);
    let Some(mut on_gpu) = start("--job-name work --task-index 1", true) else { return };
    let _none = start("--job-name work --task-index 0 --num-towers 1", true);
    let target = format!("run g.pbtxt --target grpc://127.0.0.1:{first} --feed x=[[1,0],[0,2]]");
    let fetch = || space.run(&format!("{target} --init begin --fetch product --fetch twice"));
    on_gpu.until(|| fetch().code == 0);
    assert_eq!(fetch().code(0).out, format!("{PRODUCT}twice:0 = [[2, 4],\n [9, 12]]\n"));
    let wrong = GRAPH.replace("DEVICE", "/job:work/task:0/gpu:0").replace("OTHER", "");
    fs::write(space.path("g.pbtxt"), wrong).unwrap();
    // That task was told to do without.
    let ended = fetch().code(2);
    ended.says(&["/job:work/replica:0/task:1/device:GPU:0", "refers to a valid device.\n"]);
}
