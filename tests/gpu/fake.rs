//! The stand-in for CUDA: builds it once, and runs tests and the program with it; or with the machine's own GPUs, where
//! `TFTRAIN_GPU=real` asks for them.

use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Whether the machine's own GPUs are tested.
pub(crate) fn real() -> bool {
    std::env::var_os("TFTRAIN_GPU").is_some_and(|value| value == "real")
}

/// The folder of the built libraries; `None`, said aloud, where there is no g++, or where the machine's own GPUs are tested.
#[allow(clippy::print_stderr, reason = "a skip must be seen")]
pub(crate) fn libraries() -> Option<&'static Path> {
    if real() {
        eprintln!("skipped: only the stand-in can do this");
        return None;
    }
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    BUILT.get_or_init(build).as_deref()
}

/// Builds it in a folder named after its source, unless it is there.
#[allow(clippy::print_stderr, reason = "a skip must be seen")]
fn build() -> Option<PathBuf> {
    if Command::new("g++").arg("--version").output().is_err() {
        eprintln!("skipped: there is no g++ to build tests/fakecuda with");
        return None;
    }
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fakecuda");
    let mut hasher = DefaultHasher::new();
    hash(&source, &mut hasher);
    let temporary = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let built = temporary.join(format!("fakecuda-{:016x}", hasher.finish()));
    if !built.exists() {
        let new = temporary.join(format!("fakecuda-{}.new", std::process::id()));
        let mut script = Command::new("bash");
        let output = script.arg(source.join("build.sh")).arg(&new).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        // Another test process may have been as fast.
        if fs::rename(&new, &built).is_err() {
            fs::remove_dir_all(&new).unwrap();
        }
    }
    Some(built)
}

fn hash(dir: &Path, hasher: &mut DefaultHasher) {
    let mut entries: Vec<PathBuf> =
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    entries.sort();
    for path in entries {
        match path.is_dir() {
            true => hash(&path, hasher),
            false => (path.file_name(), fs::read(&path).unwrap()).hash(hasher),
        }
    }
}

/// Set in a process that runs with the stand-in.
const INSIDE: &str = "TFTRAIN_TEST_ON_FAKE_CUDA";

/// Runs the body of the test `name` in a process of its own that finds the stand-in: the dynamic linker reads its path once,
/// at the start.
#[track_caller]
pub(crate) fn inside(name: &str, env: &[(&str, &str)], body: impl FnOnce()) {
    if std::env::var_os(INSIDE).is_some() || real() {
        return body();
    }
    let Some(libraries) = libraries() else { return };
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([name, "--exact", "--nocapture", "--test-threads=1"]).env(INSIDE, "1");
    with_libraries(&mut command, libraries);
    let output = command.envs(env.iter().copied()).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(
        output.status.success() && out.contains("1 passed"),
        "{name} with the stand-in:\n{out}\n{err}"
    );
}

/// Lets a command run on GPUs, the stand-in's with these variables, which have no meaning elsewhere; `None`, said aloud, where there are
/// fewer than `count`.
#[allow(clippy::print_stderr, reason = "a skip must be seen")]
pub(crate) fn on_gpus(command: &mut Command, count: usize, env: &[(&str, &str)]) -> Option<()> {
    if !real() {
        with_libraries(command, libraries()?);
        command.envs(env.iter().copied());
        return Some(());
    }
    match std::env::var_os("CUDA_VISIBLE_DEVICES") {
        Some(visible) => command.env("CUDA_VISIBLE_DEVICES", visible),
        None => command.env_remove("CUDA_VISIBLE_DEVICES"),
    };
    let own = env.iter().filter(|(name, _)| !name.starts_with("FAKE_CUDA_"));
    command.envs(own.copied());
    let found = tftrain::device::cuda::probe().gpus.map_or(0, |gpus| gpus.len());
    if found < count {
        eprintln!("skipped: it needs {count} GPUs, and there are {found}");
        return None;
    }
    Some(())
}

/// AddressSanitizer for kernels, where `FAKE_CUDA_ASAN=1` asks for it: its library must be there before all others.
fn with_sanitizer(command: &mut Command) {
    if std::env::var_os("FAKE_CUDA_ASAN").is_none() {
        return;
    }
    let found = Command::new("g++").arg("-print-file-name=libasan.so").output().unwrap();
    command.env("LD_PRELOAD", String::from_utf8(found.stdout).unwrap().trim());
    command.env("ASAN_OPTIONS", "detect_leaks=0:exitcode=77");
}

/// Lets a command find the stand-in, and nothing that the machine itself may have.
pub(crate) fn with_libraries(command: &mut Command, libraries: &Path) {
    let kernels = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fakecuda-kernels");
    command.env("LD_LIBRARY_PATH", libraries).env("FAKE_CUDA_CACHE", kernels);
    command.env_remove("CUDA_VISIBLE_DEVICES");
    with_sanitizer(command);
}
