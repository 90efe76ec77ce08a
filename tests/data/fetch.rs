//! Downloads from a server in this process that behaves badly on demand.
#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use tftrain::data::{DataError, Digest, fetch};

/// How the server treats its requests.
#[derive(Clone, Default)]
struct Manners {
    content: Vec<u8>,
    /// Sends everything whatever part was asked for.
    ignores_range: bool,
    /// Closes the connection after so many bytes of each body.
    cut_after: Option<usize>,
    /// Serves only so many requests properly and then closes connections at once.
    answers: Option<usize>,
    /// Neither says how long the body is.
    no_length: bool,
    /// Sends another range than asked for.
    shifts_range: bool,
    /// Answers with this line and nothing else.
    status: Option<&'static str>,
}

/// Serves until dropped; remembers the `Range` of each request.
struct Server {
    address: String,
    ranges: Arc<Mutex<Vec<Option<usize>>>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    fn start(manners: Manners) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let ranges = Arc::new(Mutex::new(Vec::new()));
        let seen = ranges.clone();
        let thread = thread::spawn(move || {
            for stream in listener.incoming() {
                if serve(stream.unwrap(), &manners, &seen).is_none() {
                    return;
                }
            }
        });
        Self { address, ranges, thread: Some(thread) }
    }

    fn url(&self) -> String {
        format!("http://{}/set.tar.gz", self.address)
    }

    fn ranges(&self) -> Vec<Option<usize>> {
        self.ranges.lock().unwrap().clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        TcpStream::connect(&self.address).unwrap().write_all(b"QUIT\r\n\r\n").unwrap();
        self.thread.take().unwrap().join().unwrap();
    }
}

/// Answers one request; `None` when asked to quit.
fn serve(mut stream: TcpStream, manners: &Manners, seen: &Mutex<Vec<Option<usize>>>) -> Option<()> {
    let lines = BufReader::new(stream.try_clone().unwrap()).lines();
    let head: Vec<String> =
        lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
    if head.first().is_some_and(|line| line == "QUIT") {
        return None;
    }
    let start = head.iter().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        let range = value.strip_prefix("bytes=")?.strip_suffix('-')?;
        name.eq_ignore_ascii_case("range").then(|| range.parse().unwrap())
    });
    let served = {
        let mut seen = seen.lock().unwrap();
        seen.push(start);
        seen.len()
    };
    if manners.answers.is_some_and(|most| served > most) {
        return Some(());
    }
    if let Some(status) = manners.status {
        let _ = write!(stream, "HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n");
        return Some(());
    }
    let total = manners.content.len();
    let start = start.filter(|_| !manners.ignores_range);
    let (status, body) = match start {
        Some(start) if start >= total => {
            let head = "HTTP/1.1 416 Range Not Satisfiable\r\nContent-Length: 0";
            let _ = write!(stream, "{head}\r\nContent-Range: bytes */{total}\r\n\r\n");
            return Some(());
        }
        Some(start) => {
            let said = start + usize::from(manners.shifts_range);
            let range = format!("Content-Range: bytes {said}-{}/{total}\r\n", total - 1);
            (format!("206 Partial Content\r\n{range}"), &manners.content[start..])
        }
        None => ("200 OK\r\n".to_owned(), &manners.content[..]),
    };
    let length = match manners.no_length {
        true => String::new(),
        false => format!("Content-Length: {}\r\n", body.len()),
    };
    // The client may hang up, which is its right.
    let _ = write!(stream, "HTTP/1.1 {status}{length}Connection: close\r\n\r\n");
    let _ = stream.write_all(&body[..manners.cut_after.unwrap_or(total).min(body.len())]);
    Some(())
}

/// 300 kB, with SHA-256 and MD5 below.
fn content() -> Vec<u8> {
    (0..300_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

fn sha256(content: &[u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("content");
    fs::write(&path, content).unwrap();
    Digest::Sha256("").of_file(&path).unwrap()
}

/// A folder to download to, and the outcome of downloading what should be `content()`.
struct Download {
    folder: tempfile::TempDir,
    progress: Vec<u64>,
}

impl Download {
    fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap(), progress: Vec::new() }
    }

    fn to(&self) -> PathBuf {
        self.folder.path().join("set.tar.gz")
    }

    fn part(&self) -> PathBuf {
        self.folder.path().join("set.tar.gz.part")
    }

    fn run(&mut self, url: &str) -> Result<(), DataError> {
        let sha256 = sha256(&content());
        let to = self.to();
        self.progress.clear();
        let progress = &mut |done, total| {
            assert_eq!(total, 300_000);
            self.progress.push(done);
        };
        fetch(url, &Digest::Sha256(&sha256), 300_000, &to, progress)
    }

    fn assert_complete(&self) {
        assert_eq!(fs::read(self.to()).unwrap(), content());
        assert!(!self.part().exists());
        assert_eq!(self.progress.last(), Some(&300_000));
    }

    fn error(&mut self, url: &str) -> String {
        let error = self.run(url).unwrap_err().to_string();
        assert!(!self.to().exists());
        assert!(error.contains(url) && error.contains("--synthetic"), "{error}");
        error
    }
}

fn polite() -> Manners {
    Manners { content: content(), ..Manners::default() }
}

fn holds_prefix(path: &Path, len: usize) -> bool {
    fs::read(path).unwrap() == content()[..len]
}

#[test]
fn downloads_once() {
    let server = Server::start(polite());
    let mut download = Download::new();
    download.run(&server.url()).unwrap();
    download.assert_complete();
    assert_eq!(download.progress.first(), Some(&0));
    assert!(download.progress.is_sorted());

    download.run(&server.url()).unwrap();
    assert_eq!(server.ranges(), [None], "what is there already is not asked for again");
}

#[test]
fn continues_a_part_of_an_earlier_call() {
    let server = Server::start(polite());
    let mut download = Download::new();
    fs::write(download.part(), &content()[..123_456]).unwrap();
    download.run(&server.url()).unwrap();
    download.assert_complete();
    assert_eq!(server.ranges(), [Some(123_456)]);
    assert_eq!(download.progress.first(), Some(&123_456));
}

#[test]
fn a_complete_part_needs_no_server() {
    let mut download = Download::new();
    fs::write(download.part(), content()).unwrap();
    download.run("http://127.0.0.1:1/set.tar.gz").unwrap();
    assert_eq!(fs::read(download.to()).unwrap(), content());
}

#[test]
fn starts_over_where_the_server_ignores_ranges() {
    let server = Server::start(Manners { ignores_range: true, ..polite() });
    let mut download = Download::new();
    fs::write(download.part(), [1; 1000]).unwrap();
    download.run(&server.url()).unwrap();
    download.assert_complete();
    assert_eq!(server.ranges(), [Some(1000)]);
}

#[test]
fn starts_over_where_the_part_is_too_long() {
    let server = Server::start(polite());
    let mut download = Download::new();
    fs::write(download.part(), [1; 300_001]).unwrap();
    download.run(&server.url()).unwrap();
    download.assert_complete();
    assert_eq!(server.ranges(), [None]);
}

#[test]
fn a_broken_connection_is_continued_where_it_broke() {
    for no_length in [false, true] {
        let server = Server::start(Manners { cut_after: Some(130_000), no_length, ..polite() });
        let mut download = Download::new();
        download.run(&server.url()).unwrap();
        download.assert_complete();
        assert_eq!(server.ranges(), [None, Some(130_000), Some(260_000)]);
    }
}

#[test]
fn gives_up_without_progress_and_keeps_the_part() {
    // Starts over each time and breaks at the same place.
    let manners = Manners { ignores_range: true, cut_after: Some(100_000), ..polite() };
    let server = Server::start(manners);
    let mut download = Download::new();
    let error = download.error(&server.url());
    assert!(error.contains("100000 bytes") || error.contains("disconnected"), "{error}");
    assert_eq!(server.ranges().len(), 5);
    assert!(holds_prefix(&download.part(), 100_000));

    // Answers once, and then only hangs up.
    let server = Server::start(Manners { answers: Some(1), cut_after: Some(70_000), ..polite() });
    let mut download = Download::new();
    download.error(&server.url());
    assert!(holds_prefix(&download.part(), 70_000));
}

#[test]
fn no_network_is_told_at_once() {
    // Bound and closed again: nobody listens there.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut download = Download::new();
    let error = download.error(&format!("http://{address}/set.tar.gz"));
    assert!(error.contains("check the network"), "{error}");
    assert!(!download.part().exists());
}

#[test]
fn another_content_is_refused_and_removed() {
    let mut other = content();
    other[200_000] ^= 1;
    let (expected, got) = (sha256(&content()), sha256(&other));
    let server = Server::start(Manners { content: other, ..Manners::default() });
    let mut download = Download::new();
    let error = download.error(&server.url());
    assert!(error.contains(&expected) && error.contains(&got), "{error}");
    assert!(!download.part().exists());
}

#[test]
fn another_size_is_refused_and_removed() {
    for (len, no_length) in [(299_999, false), (300_001, false), (400_000, true)] {
        let mut other = content();
        other.resize(len, 0);
        let server = Server::start(Manners { content: other, no_length, ..Manners::default() });
        let mut download = Download::new();
        let error = download.error(&server.url());
        assert!(error.contains("instead of the expected 300000"), "{error}");
        assert!(no_length || error.contains(&format!("{len} bytes")), "{error}");
        assert!(!download.part().exists());
        assert_eq!(server.ranges().len(), 1);
    }
    // Without a length, a short file shows when its rest is asked for.
    let short = content()[..1000].to_vec();
    let server = Server::start(Manners { content: short, no_length: true, ..Manners::default() });
    let mut download = Download::new();
    let error = download.error(&server.url());
    assert!(error.contains("1000 bytes instead of the expected 300000"), "{error}");
    assert!(!download.part().exists());
}

#[test]
fn other_answers_are_told() {
    for status in ["404 Not Found", "503 Service Unavailable"] {
        let server = Server::start(Manners { status: Some(status), ..polite() });
        let error = Download::new().error(&server.url());
        assert!(error.contains(status), "{error}");
        assert_eq!(server.ranges().len(), 1);
    }
    let server = Server::start(Manners { shifts_range: true, ..polite() });
    let mut download = Download::new();
    fs::write(download.part(), &content()[..5]).unwrap();
    let error = download.error(&server.url());
    assert!(error.contains("another range"), "{error}");
}

#[test]
fn md5_serves_where_nothing_better_is_published() {
    let server = Server::start(Manners { content: b"abc".to_vec(), ..Manners::default() });
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("new/abc");
    let digest = Digest::Md5("900150983CD24FB0D6963F7D28E17F72");
    fetch(&server.url(), &digest, 3, &to, &mut |_, _| ()).unwrap();
    assert_eq!(fs::read(&to).unwrap(), b"abc");
    let wrong = Digest::Md5("00000000000000000000000000000000");
    let error = fetch(&server.url(), &wrong, 3, &to, &mut |_, _| ()).unwrap_err();
    assert!(matches!(error, DataError::Digest { .. }), "{error}");
}
