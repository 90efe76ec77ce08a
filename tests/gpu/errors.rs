//! What goes wrong with GPUs: exit 9, and a sentence that names the thing and what to do.

use std::fs;

use crate::cli::{Ended, SMALL, Space};
use crate::fake::{libraries, with_libraries};

/// Runs one step on GPUs; `None` where there is no stand-in.
fn run(space: &Space, flags: &str, env: &[(&str, &str)]) -> Option<Ended> {
    let mut command = space.command(&format!("{SMALL} --max-steps 3 --train-dir run {flags}"));
    with_libraries(&mut command, libraries()?);
    command.env("XDG_CACHE_HOME", space.path("cache"));
    Some(command.envs(env.iter().copied()).output().unwrap().into())
}

#[test]
fn each_names_the_thing_and_what_to_do() {
    let cases: &[(&str, (&str, &str), &[&str])] = &[
        ("--num-gpus 3", ("", ""), &["3 GPUs were asked for", "2 are visible", "no GPU 2"]),
        ("--gpu-indices 0,7", ("", ""), &["2 are visible", "no GPU 7"]),
        ("--num-gpus 2", ("CUDA_VISIBLE_DEVICES", "1"), &["1 is visible", "--num-towers 2"]),
        (
            "--num-gpus 1",
            ("CUDA_VISIBLE_DEVICES", ""),
            &["none is visible", "CUDA_VISIBLE_DEVICES"],
        ),
        (
            "--num-gpus 1",
            ("FAKE_CUDA_DEVICES", "0"),
            &["none is visible", "--allow-soft-placement"],
        ),
        (
            "--num-gpus 1",
            ("FAKE_CUDA_DRIVER_VERSION", "11040"),
            &["CUDA 11.4", "12.0 is the oldest", "install driver"],
        ),
        (
            "--num-gpus 1",
            ("FAKE_CUDA_DRIVER_VERSION", "12040"),
            &["CUDA 12.4", "NVRTC 13", "install a newer driver"],
        ),
        (
            "--num-gpus 1",
            ("FAKE_CUDA_MEMORY", "10000000"),
            &["/device:GPU:0 has", "free", "asked for", "--batch-size 2"],
        ),
        (
            "--num-gpus 1",
            ("FAKE_CUDA_MEMORY", "3000000"),
            &["/device:GPU:0 has 3.00 MB free", "not even a batch of one example fits"],
        ),
        ("--num-gpus 1", ("FAKE_CUDA_FAIL", "compile:1:6"), &["/device:GPU:0", "do not build"]),
        ("--num-gpus 1", ("FAKE_CUDA_FAIL", "launch:9:214"), &["GPU:0", "ECC"]),
        ("--num-gpus 1", ("FAKE_CUDA_FAIL", "launch:9:719"), &["GPU:0", "LAUNCH_FAILED", "dmesg"]),
        ("--num-gpus 2", ("FAKE_CUDA_FAIL", "launch:9:719@1"), &["tower_1", "GPU:1"]),
        ("--num-gpus 1", ("FAKE_CUDA_FAIL", "cublaslt:1:14"), &["GPU:0", "cuBLASLt"]),
        ("--num-gpus 2", ("FAKE_CUDA_FAIL", "nccl:3:1"), &["GPU:0", "summing gradients by NCCL"]),
        // Its stream stands still until the communicator is aborted.
        ("--num-gpus 2", ("FAKE_CUDA_FAIL", "nccl_async:3:3"), &["GPU:0", "NCCL error 3"]),
        (
            "--num-gpus 2 --reduce nccl",
            ("FAKE_CUDA_FAIL", "nccl_init:2:2"),
            &["reduce: nccl", "error 2"],
        ),
    ];
    for (flags, variable, words) in cases {
        let space = Space::new();
        let env: Vec<_> =
            Some(*variable).into_iter().filter(|(name, _)| !name.is_empty()).collect();
        let Some(ended) = run(&space, flags, &env) else { return };
        ended.code(9).says(words);
        assert!(space.checkpoints("run").is_empty(), "{flags} {variable:?}");
    }
}

#[test]
fn a_missing_library_is_named() {
    let Some(libraries) = libraries() else { return };
    for (missing, words) in [
        ("libcuda.so.1", &["no CUDA driver", "libcuda.so.1"][..]),
        ("libcublasLt.so.13", &["cublasLt", "LD_LIBRARY_PATH"]),
        ("libnvrtc.so.13", &["nvrtc", "LD_LIBRARY_PATH"]),
    ] {
        let space = Space::new();
        let some = space.path("libraries");
        copy_without(libraries, &some, missing);
        let mut command = space.command(&format!("{SMALL} --num-gpus 1 --train-dir run"));
        with_libraries(&mut command, &some);
        command.env("XDG_CACHE_HOME", space.path("cache"));
        let ended: Ended = command.output().unwrap().into();
        ended.code(9).says(words);
    }
}

#[test]
fn soft_placement_says_so_once() {
    let space = Space::new();
    let Some(ended) = run(&space, "--num-gpus 3 --allow-soft-placement", &[]) else { return };
    let ended = ended.code(0).says(&["WARNING", "3 GPU towers run on the CPU", "2 are visible"]);
    assert!(ended.out.contains("/device:CPU:2"), "{}", ended.out);
}

#[test]
fn kernels_are_kept_and_a_broken_file_is_replaced() {
    let space = Space::new();
    let folder = space.path("cache/tftrain");
    let kernels = || -> Vec<_> {
        fs::read_dir(&folder).into_iter().flatten().map(|entry| entry.unwrap().path()).collect()
    };
    let Some(ended) = run(&space, "--num-gpus 2", &[]) else { return };
    ended.code(0);
    let kept = kernels();
    assert_eq!(kept.len(), 1, "{kept:?}");
    let image = fs::read(&kept[0]).unwrap();
    // No compiler is needed any more.
    run(&space, "--num-gpus 1 --overwrite", &[("FAKE_CUDA_FAIL", "compile:1:6")]).unwrap().code(0);
    fs::write(&kept[0], &image[..image.len() / 2]).unwrap();
    run(&space, "--num-gpus 1 --overwrite", &[]).unwrap().code(0);
    assert_eq!(fs::read(&kept[0]).unwrap(), image);
    // A file where the folder should be.
    fs::remove_dir_all(&folder).unwrap();
    fs::write(&folder, "").unwrap();
    run(&space, "--num-gpus 1 --overwrite", &[]).unwrap().code(0);
}

#[test]
fn without_cudnn_own_kernels_convolve_and_the_header_says_so() {
    let Some(libraries) = libraries() else { return };
    let space = Space::new();
    let some = space.path("libraries");
    copy_without(libraries, &some, "libcudnn.so.9");
    let flags = "cifar10 --synthetic --batch-size 1 --set data.examples=100 --summary-every 0 --max-steps 3";
    let mut command = space.command(&format!("{flags} --num-gpus 1 --train-dir own"));
    with_libraries(&mut command, &some);
    command.env("XDG_CACHE_HOME", space.path("cache"));
    let ended: Ended = command.output().unwrap().into();
    let out = ended.code(0).out;
    assert!(out.contains("own convolutions"), "{out}");
    space.ok(&format!("{flags} --train-dir cpu"));
    super::training::close(&space.checkpoint("own", 3), &space.checkpoint("cpu", 3), 1e-4);
}

pub(crate) fn copy_without(from: &std::path::Path, to: &std::path::Path, missing: &str) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name();
        if name != missing {
            std::os::unix::fs::symlink(entry.path(), to.join(name)).unwrap();
        }
    }
}
