//! Which GPUs a process takes: where nobody says, beside other processes of the host, several towers on one.

use crate::cli::{Live, SMALL, Space, ports};
use crate::fake::{libraries, with_libraries};
use crate::training::{NARROW, close, run};

const TWO: &str = "2 on /job:localhost/replica:0/task:0/device:GPU:0, /job:localhost/replica:0/task:0/device:GPU:1 (";
const ON_CPU: &str = "1 on /job:localhost/replica:0/task:0/device:CPU:0";
const FOUR: (&str, &str) = ("FAKE_CUDA_DEVICES", "4");

#[test]
fn without_flags_all_gpus_are_used() {
    let space = Space::new();
    let flags = format!("{NARROW} --max-steps 1");
    let Some(ended) = run(&space, &format!("{flags} --train-dir all"), &[]) else { return };
    let out = ended.code(0).out;
    assert!(out.contains(TWO), "{out}");
    assert!(out.contains("Peer access:   between all 2\n") && !out.contains("Left:"), "{out}");
    // A run goes on with what it had.
    let resumed = format!("{flags} --max-steps 2 --resume --train-dir all");
    let resumed = run(&space, &resumed.replace("--max-steps 1 ", ""), &[FOUR]).unwrap();
    let out = resumed.code(0).out;
    assert!(out.contains(TWO), "{out}");
    assert!(out.contains("Left:          /device:GPU:2, /device:GPU:3\n"), "{out}");
    let towers = run(&space, &format!("{flags} --num-towers 1 --train-dir cpu"), &[]).unwrap();
    let out = towers.code(0).out;
    assert!(out.contains(ON_CPU), "{out}");
    assert!(out.contains("Left:          /device:GPU:0, /device:GPU:1\n"), "{out}");
}

#[test]
fn without_usable_gpus_the_cpu_computes_and_a_broken_driver_is_told_of() {
    let space = Space::new();
    let flags = format!("{SMALL} --max-steps 1 --overwrite --train-dir run");
    let none = [("FAKE_CUDA_DEVICES", "0")];
    let Some(ended) = run(&space, &flags, &none) else { return };
    let ended = ended.code(0);
    assert!(!ended.err.contains("WARNING") && ended.out.contains(ON_CPU));
    let old = [("FAKE_CUDA_DRIVER_VERSION", "11040")];
    let ended = run(&space, &flags, &old).unwrap().code(0);
    let ended = ended.says(&["WARNING: the towers are on the CPU", "CUDA 11.4", "--num-gpus"]);
    assert!(ended.out.contains(ON_CPU), "{}", ended.out);
    let needs = format!("{flags} --precision tf32");
    run(&space, &needs, &old).unwrap().code(9).says(&["precision: tf32 needs GPUs", "CUDA 11.4"]);
}

/// NCCL wants a GPU for each rank; towers that share one meet on the host.
#[test]
fn four_towers_on_one_gpu_average_on_the_cpu() {
    const STEPS: u64 = 3;
    let space = Space::new();
    let flags = format!("{NARROW} --max-steps {STEPS}");
    let shared = format!("{flags} --gpu-indices 0,0,0,0 --train-dir shared");
    let Some(ended) = run(&space, &shared, &[]) else { return };
    let out = ended.code(0).out;
    assert!(out.contains("Reduce:        cpu (two towers share a GPU"), "{out}");
    assert!(out.contains("4 on /job:localhost/replica:0/task:0/device:GPU:0, /job:localhost/replica:0/task:0/device:GPU:0"), "{out}");
    space.ok(&format!("{flags} --set conv=direct --num-towers 4 --train-dir towers"));
    close(&space.checkpoint("shared", STEPS), &space.checkpoint("towers", STEPS), 1e-4);
}

#[test]
fn the_ways_between_gpus_are_listed() {
    let space = Space::new();
    let Some(ended) = run(&space, "devices", &[]) else { return };
    let out = ended.code(0).out;
    assert!(
        out.contains("/device:GPU:1 -> /device:GPU:0: peer access with atomics, link of rank 0"),
        "{out}"
    );
    let without = run(&space, "devices", &[("FAKE_CUDA_PEERS", "0")]).unwrap().code(0).out;
    assert!(without.contains("/device:GPU:0 -> /device:GPU:1: no peer access"), "{without}");
}

/// Starts a rank as Slurm does on one node with four GPUs, or two for each task.
fn rank(space: &Space, rank: usize, port: u16, flags: &str, env: &[(&str, &str)]) -> Option<Live> {
    let mut command = space.command(flags);
    with_libraries(&mut command, libraries()?);
    let (rank, port) = (rank.to_string(), port.to_string());
    command.env("XDG_CACHE_HOME", space.path("cache")).envs([
        ("SLURM_PROCID", &*rank),
        ("SLURM_LOCALID", &*rank),
        ("SLURM_NTASKS", "2"),
        ("SLURM_JOB_NODELIST", "127.0.0.1"),
        ("MASTER_PORT", &*port),
        FOUR,
    ]);
    Some(space.spawn(command.envs(env.iter().copied())))
}

#[test]
fn slurms_tasks_take_gpus_of_their_own() {
    const STEPS: u64 = 5;
    let space = Space::new();
    let flags = format!("{NARROW} --max-steps {STEPS}");
    let all = ("CUDA_VISIBLE_DEVICES", "0,1,2,3");
    let shared = [[all], [all]].map(Vec::from);
    let masks = ["0,1", "2,3"]
        .map(|mask| vec![("CUDA_VISIBLE_DEVICES", mask), ("SLURM_GPUS_PER_TASK", "2")]);
    let ways = [
        ("gres", "--num-gpus 2", &shared),
        ("every", "", &shared),
        ("per-task", "--num-gpus 2", &masks),
        ("every-per-task", "", &masks),
    ];
    space.ok(&format!("{flags} --set conv=direct --num-towers 4 --train-dir towers"));
    for (name, gpus, env) in ways {
        let flags = format!("{flags} {gpus} --set cluster.engine=nccl --train-dir {name}");
        let port = ports(1)[0];
        let start = |i: usize| rank(&space, i, port, &flags, &env[i]);
        let (Some(first), Some(second)) = (start(0), start(1)) else { return };
        for task in [first, second] {
            task.ended().code(0);
        }
        close(&space.checkpoint(name, STEPS), &space.checkpoint("towers", STEPS), 1e-4);
    }
}
