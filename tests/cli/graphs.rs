//! `tftrain run`: graphs that TensorFlow wrote, here and on a server.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;

use crate::support::{Space, ports};

/// `y = x * c + 1`, `c` on `/job:ps/task:0`, and a counter.
const GRAPH: &str = r#"
    node { name: "x" op: "Placeholder" attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "shape" value { shape { unknown_rank: true } } } }
    node { name: "c" op: "Const" device: "DEVICE" attr { key: "dtype" value { type: DT_FLOAT } }
           attr { key: "value" value { tensor { dtype: DT_FLOAT tensor_shape { dim { size: 2 } } float_val: 2 float_val: 3 } } } }
    node { name: "one" op: "Const" attr { key: "dtype" value { type: DT_FLOAT } }
           attr { key: "value" value { tensor { dtype: DT_FLOAT tensor_shape { } float_val: 1 } } } }
    node { name: "mul" op: "Mul" input: "x" input: "c" attr { key: "T" value { type: DT_FLOAT } } }
    node { name: "y" op: "AddV2" input: "mul" input: "one" attr { key: "T" value { type: DT_FLOAT } } }
    node { name: "count" op: "VariableV2" attr { key: "dtype" value { type: DT_FLOAT } } attr { key: "shape" value { shape { } } } }
    node { name: "zero" op: "Assign" input: "count" input: "one" attr { key: "T" value { type: DT_FLOAT } } }
    node { name: "bump" op: "AssignAdd" input: "count" input: "one" attr { key: "T" value { type: DT_FLOAT } } }
    versions { producer: 2474 }
"#;

fn space(device: &str) -> Space {
    let space = Space::new();
    fs::write(space.path("g.pbtxt"), GRAPH.replace("DEVICE", device)).unwrap();
    space
}

#[test]
fn a_graph_runs_here() {
    let space = space("");
    let out = space.ok("run g.pbtxt --fetch y --feed x=[[1,2],[3,4]] --write out").out;
    assert_eq!(out, "y:0 = [[3, 7],\n [7, 13]]\n");
    let file = fs::read(space.path("out/y_0.npy")).unwrap();
    assert_eq!(&file[..6], b"\x93NUMPY");
    assert_eq!(&file[file.len() - 4..], 13f32.to_le_bytes());
    let out = space.ok("run g.pbtxt --fetch y --feed x=@out/y_0.npy").out;
    assert_eq!(out, "y:0 = [[7, 22],\n [15, 40]]\n");
    let out = space.ok("run g.pbtxt --init zero --fetch bump --steps 3").out;
    assert_eq!(out, "bump:0 = 2\nbump:0 = 3\nbump:0 = 4\n");
}

#[test]
fn a_dry_run_tells_where_nodes_would_go() {
    let space = space("/job:ps/task:0");
    fs::write(
        space.path("c.yaml"),
        "cluster: {mode: session, ps: [\"127.0.0.1:1\"], work: [\"127.0.0.1:2\"]}\n",
    )
    .unwrap();
    let out = space.ok("run g.pbtxt --dry-run --config c.yaml").out;
    assert!(out.contains("c: (Const): /job:ps/replica:0/task:0/device:CPU:0\n"), "{out}");
    space.run("run g.pbtxt --dry-run").code(2).says(&["Cannot assign a device", "/job:ps/task:0"]);
}

#[test]
fn what_cannot_run_is_told() {
    let space = space("");
    space.run("run g.pbtxt").code(2).says(&["--fetch", "the graph ends in y"]);
    space.run("run g.pbtxt --fetch z").code(2).says(&["z:0"]);
    space.run("run g.pbtxt --fetch count").code(1).says(&["uninitialized value count"]);
    space.run("run g.pbtxt --fetch y --feed x=one").code(2).says(&["--feed x=one", "float"]);
    space.run("run g.pbtxt --fetch y --feed x=[1,2,3]").code(2).says(&["ncompatible shapes"]);
    space.run("run g.txt --fetch y").code(2).says(&["g.txt", ".pbtxt"]);
    space.run("run g.pbtxt --fetch y --target grpc://127.0.0.1:1").code(5).says(&["127.0.0.1:1"]);
    let unknown = GRAPH.replace("AddV2", "Frobnicate");
    fs::write(space.path("u.pbtxt"), unknown).unwrap();
    space.run("run u.pbtxt --fetch y").code(2).says(&["Frobnicate", "y"]);
}

#[test]
fn a_graph_runs_on_a_server() {
    let space = space("/job:ps/task:0");
    let [ps, work] = ports(2)[..] else { panic!() };
    let cluster = format!(
        "cluster: {{mode: session, ps: [\"127.0.0.1:{ps}\"], work: [\"127.0.0.1:{work}\"]}}\n"
    );
    fs::write(space.path("c.yaml"), cluster).unwrap();
    let _ps = space.start("serve --config c.yaml --job-name ps --task-index 0");
    let mut work_task = space.start("serve --config c.yaml --job-name work --task-index 0");
    let run = || {
        space.run(&format!("run g.pbtxt --target grpc://127.0.0.1:{work} --fetch y --feed x=[1,1]"))
    };
    work_task.until(|| run().code == 0);
    assert_eq!(run().code(0).out, "y:0 = [3, 4]\n");
}
