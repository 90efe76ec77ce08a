//! Who may speak in a cluster, and what becomes of everybody else while it trains.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use crate::cluster::first_address;
use crate::support::{Live, Space, cluster, ports};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// An HTTP/2 frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut out = (payload.len() as u32).to_be_bytes()[1..].to_vec();
    out.extend([kind, flags]);
    out.extend(stream.to_be_bytes());
    out.extend(payload);
    out
}

/// A call without a token, whose message claims to be of 1 GiB.
fn oversized_message() -> Vec<u8> {
    let mut headers = Vec::new();
    for (name, value) in [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/tftrain.v1.Control/Join"),
        (":authority", "localhost"),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ] {
        // Literals that stay out of the table (RFC 7541, section 6.2.2).
        headers.push(0);
        for text in [name, value] {
            headers.push(text.len() as u8);
            headers.extend(text.bytes());
        }
    }
    let mut message = vec![0];
    message.extend((1u32 << 30).to_be_bytes());
    message.extend([7; 1000]);
    let frames = [frame(4, 0, 0, &[]), frame(1, 4, 1, &headers), frame(0, 0, 1, &message)];
    [PREFACE.to_vec(), frames.concat()].concat()
}

/// Says what no task says, and stays connected.
fn strangers(address: &str) -> Vec<TcpStream> {
    let noise: Vec<u8> =
        (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    // A length of 16 MiB, where 1 MiB is the most.
    let oversized_frame = [PREFACE, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1], &noise[..]].concat();
    let hello = [PREFACE.to_vec(), frame(4, 0, 0, &[])].concat();
    let sayings: [&[u8]; 9] = [
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        &PREFACE[..7],
        PREFACE,
        &hello,
        &noise,
        &[PREFACE, &noise].concat(),
        &oversized_frame,
        &oversized_message(),
    ];
    let say = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(address).unwrap();
        // The other side may hang up in the middle.
        let _ = stream.write_all(bytes);
        stream
    };
    sayings.map(say).into()
}

/// Begins a greeting slower than anybody waits, until the other side hangs up.
fn dawdle(address: &str) -> std::thread::JoinHandle<bool> {
    let mut stream = TcpStream::connect(address).unwrap();
    std::thread::spawn(move || {
        stream.set_read_timeout(Some(Duration::from_secs(1))).unwrap();
        for byte in &PREFACE[..20] {
            if stream.write_all(&[*byte]).is_err() {
                return true;
            }
            match stream.read(&mut [0; 64]) {
                Ok(0) => return true,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return true,
                _ => {}
            }
        }
        false
    })
}

/// A task of the cluster file that logs warnings.
fn task(space: &Space, job: &str, index: u32, rest: &str) -> Live {
    let args = format!("train --config cluster.yaml --job-name {job} --task-index {index} {rest}");
    space.spawn(space.command(&args).env("RUST_LOG", "warn"))
}

/// A worker that is not of the cluster whose parameter server it calls.
fn intruder(address: &str) -> String {
    let own = ports(1)[0];
    let hosts = format!("--ps-hosts {address} --worker-hosts 127.0.0.1:{own}");
    format!("line-fit {hosts} --job-name worker --task-index 0 --train-dir other")
}

#[test]
fn only_loopback_is_open_to_everybody() {
    let space = Space::new();
    let [ps, worker] = ports(2)[..] else { panic!() };
    let hosts = format!("--ps-hosts 0.0.0.0:{ps} --worker-hosts 0.0.0.0:{worker}");
    for job in ["ps", "worker"] {
        space.run(&format!("line-fit {hosts} --job-name {job} --task-index 0")).code(8).says(&[
            &format!("{job}:0"),
            "0.0.0.0",
            "--token-file",
            "--tls-cert",
        ]);
    }
    assert_eq!(space.checkpoints("runs/line"), [0; 0]);
    // With a token it listens, and waits for a server that is not there.
    let hosts = format!("--ps-hosts 127.0.0.1:{ps} --worker-hosts 0.0.0.0:{worker}");
    space
        .shell(&format!(
            "TFTRAIN_TOKEN=secret exec $TFTRAIN line-fit {hosts} --job-name worker --task-index 0 \
             --train-dir other --rendezvous-timeout 1"
        ))
        .code(4)
        .says(&["ps:0", "did not come"]);
}

#[test]
fn what_is_no_token_or_certificate_is_a_usage_error() {
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 1, "  token_file: token\n");
    let ps = "train --config cluster.yaml --job-name ps --task-index 0";
    space.run(ps).code(2).says(&["cannot read token"]);
    fs::write(space.path("token"), "two words").unwrap();
    space.run(ps).code(2).says(&["one word"]);
    fs::write(space.path("token"), "secret").unwrap();
    space.run(&format!("{ps} --tls-ca token")).code(2).says(&["--tls-key"]);
    let tls = "--tls-ca token --tls-cert token --tls-key token";
    space.run(&format!("{ps} {tls}")).code(2).says(&["certificates"]);
}

#[test]
fn a_cluster_trains_on_whoever_else_calls() {
    const STEPS: u64 = 4000;
    let space = Space::new();
    cluster(&space, "cluster.yaml", 1, 2, "  token_file: token\n");
    fs::write(space.path("token"), "secret\n").unwrap();
    fs::write(space.path("guess"), "sesame\n").unwrap();
    let flags = format!("--train-dir run --log-every 1 --max-steps {STEPS}");
    let ps = task(&space, "ps", 0, &flags);
    let address = first_address(&space);
    let mut chief = task(&space, "worker", 0, &flags);
    let worker = task(&space, "worker", 1, &flags);
    chief.until(|| space.steps_so_far("run") > 5);

    let intruder = intruder(&address);
    space.run(&format!("{intruder} --token-file guess")).code(8).says(&[
        "ps:0 refuses",
        "wrong token",
        "--token-file",
    ]);
    let connected = strangers(&address);
    let slow = dawdle(&address);
    space.run(&format!("{intruder} --overwrite")).code(8).says(&["ps:0 refuses", "no token"]);
    assert!(space.steps_so_far("run") < STEPS, "the run was over too early to be disturbed");

    chief.ended().code(0);
    worker.ended().code(0);
    ps.ended().code(0).says(&["refused ", "wrong token"]);
    assert_eq!(space.checkpoints("run"), [STEPS]);
    assert!(slow.join().unwrap(), "nobody hung up");
    drop(connected);
}

#[test]
fn strangers_do_not_disturb_an_open_cluster() {
    for (mode, ps) in [("ps-async", 1), ("collective", 0)] {
        const STEPS: u64 = 6000;
        let space = Space::new();
        cluster(&space, "cluster.yaml", ps, 2, &format!("  mode: {mode}\n"));
        let mut launch = space.start(&format!(
            "launch --config cluster.yaml -- --train-dir run --log-every 1 --max-steps {STEPS}"
        ));
        launch.until(|| space.steps_so_far("run") > 5);
        let connected = strangers(&first_address(&space));
        assert!(space.steps_so_far("run") < STEPS, "{mode}: over too early to be disturbed");
        launch.ended().code(0);
        assert_eq!(space.checkpoints("run"), [STEPS], "{mode}");
        drop(connected);
    }
}

#[test]
fn certificates_admit_their_tasks_and_nobody_else() {
    let space = Space::new();
    let certs = "certs --task ps:0=127.0.0.1 worker:0=127.0.0.1 --task worker:1=127.0.0.1";
    space.ok(&format!("{certs} --out certs"));
    space.ok(&format!("{certs} --out others"));
    for name in ["ca", "ps-0", "worker-0", "worker-1"] {
        let key = fs::metadata(space.path(&format!("certs/{name}.key"))).unwrap();
        assert_eq!(key.permissions().mode() & 0o777, 0o600, "{name}");
        assert!(space.path(&format!("certs/{name}.pem")).is_file(), "{name}");
    }
    space.run(&format!("{certs} --out certs")).code(2).says(&["ca.key exists"]);
    space.run("certs --out c --task worker:0").code(2).says(&["worker:0=host"]);
    space.run("certs --out c --task worker:0=a worker:0=b").code(2).says(&["worker:0 twice"]);

    let tls = "  tls: {ca: certs/ca.pem, cert: \"certs/{job}-{index}.pem\", key: \"certs/{job}-{index}.key\"}\n";
    cluster(&space, "cluster.yaml", 1, 2, tls);
    space.ok("launch --config cluster.yaml -- --train-dir launched --max-steps 300");
    assert_eq!(space.checkpoints("launched"), [300]);

    const STEPS: u64 = 6000;
    cluster(&space, "cluster.yaml", 1, 1, tls);
    let flags = format!("--log-every 1 --max-steps {STEPS}");
    let ps = task(&space, "ps", 0, &flags);
    let mut chief = task(&space, "worker", 0, &format!("{flags} --train-dir run"));
    chief.until(|| space.steps_so_far("run") > 5);
    let address = first_address(&space);
    let connected = strangers(&address);
    let theirs = format!(
        "{} --overwrite --tls-cert others/worker-0.pem --tls-key others/worker-0.key",
        intruder(&address)
    );
    for authority in ["certs", "others"] {
        space
            .run(&format!("{theirs} --tls-ca {authority}/ca.pem"))
            .code(8)
            .says(&["ps:0 refuses", "certificates"]);
    }
    assert!(space.steps_so_far("run") < STEPS, "the run was over too early to be disturbed");
    chief.ended().code(0);
    ps.ended().code(0).says(&["refused 127.0.0.1", "does not speak TLS"]);
    drop(connected);
}
