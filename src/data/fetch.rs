//! Downloads a file of known size and fingerprint, continuing where an earlier try stopped.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ureq::http::{Response, StatusCode, header};
use ureq::{Agent, Body};

use super::{DataError, Digest};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest silence.
const READ_TIMEOUT: Duration = Duration::from_secs(30);
/// Tries without a new byte after one that brought some.
const RETRIES: u32 = 3;
const PAUSE: Duration = Duration::from_millis(200);

/// Downloads `url` to `to`; nothing happens where `to` is that file already.
///
/// The bytes go to `<to>.part`, which a later call continues, and which gets its name when it is
/// complete and checked. `progress` is told the bytes that are there and `size`.
///
/// # Errors
/// When the network fails without progress, the file has another size or fingerprint (it is removed
/// then), or it cannot be written.
pub fn fetch(
    url: &str,
    digest: &Digest<'_>,
    size: u64,
    to: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), DataError> {
    if fs::metadata(to).is_ok_and(|data| data.len() == size)
        && digest.of_file(to).is_ok_and(|got| got.eq_ignore_ascii_case(digest.expected()))
    {
        return Ok(());
    }
    let mut name = to.as_os_str().to_owned();
    name.push(".part");
    let transfer = Transfer { url, size, part: PathBuf::from(name), agent: agent() };
    let result = transfer
        .complete(progress)
        .and_then(|()| transfer.check(digest))
        .and_then(|()| transfer.finish(to));
    if matches!(result, Err(DataError::Size { .. } | DataError::Digest { .. })) {
        // A part that stays would only fail again.
        let _ = fs::remove_file(&transfer.part);
    }
    result
}

fn agent() -> Agent {
    Agent::config_builder()
        .timeout_connect(Some(CONNECT_TIMEOUT))
        .timeout_recv_response(Some(READ_TIMEOUT))
        .timeout_per_read(Some(READ_TIMEOUT))
        .http_status_as_error(false)
        .build()
        .into()
}

/// How a try ended early.
enum Stop {
    /// Another try cannot help.
    Final(DataError),
    /// The connection failed; says how.
    Broken(String),
}

struct Transfer<'a> {
    url: &'a str,
    size: u64,
    part: PathBuf,
    agent: Agent,
}

impl Transfer<'_> {
    /// Tries until the part has all its bytes.
    fn complete(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), DataError> {
        let mut most = self.part_len();
        let mut retries = 0;
        while self.part_len() != self.size {
            match self.attempt(progress) {
                Ok(()) => return Ok(()),
                Err(Stop::Final(error)) => return Err(error),
                Err(Stop::Broken(problem)) => {
                    // Measured against the best try: a server that starts over each time and
                    // breaks at the same place makes no progress.
                    if self.part_len() > most {
                        most = self.part_len();
                        retries = RETRIES;
                    } else if retries == 0 {
                        return Err(self.failed(problem));
                    } else {
                        retries -= 1;
                    }
                    std::thread::sleep(PAUSE);
                }
            }
        }
        Ok(())
    }

    /// One request for the bytes that are missing.
    fn attempt(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Stop> {
        let have = match self.part_len() {
            have if have < self.size => have,
            // Longer than the file: not a part of it.
            _ => 0,
        };
        let mut request = self.agent.get(self.url);
        if have > 0 {
            request = request.header(header::RANGE, format!("bytes={have}-"));
        }
        let response = request.call().map_err(|e| Stop::Broken(e.to_string()))?;
        // `bytes first-last/total`, or `bytes */total`.
        let (range, total) =
            text(&response, header::CONTENT_RANGE).split_once('/').unwrap_or_default();
        let first = range.trim_start_matches("bytes ").split('-').next().and_then(number);
        let (start, announced) = match response.status() {
            StatusCode::OK => (0, number(text(&response, header::CONTENT_LENGTH))),
            StatusCode::PARTIAL_CONTENT if first == Some(have) => (have, number(total)),
            StatusCode::PARTIAL_CONTENT => {
                return Err(self.refused("the server sent another range than asked for"));
            }
            // The server's file is no longer than the part.
            StatusCode::RANGE_NOT_SATISFIABLE => {
                return Err(Stop::Final(self.size_error(number(total).unwrap_or(have))));
            }
            status => return Err(self.refused(&format!("the server answered {status}"))),
        };
        if let Some(got) = announced.filter(|&got| got != self.size) {
            return Err(Stop::Final(self.size_error(got)));
        }
        self.receive(start, response.into_body(), progress)
    }

    /// Writes the body to the part, from byte `start` on.
    fn receive(
        &self,
        start: u64,
        body: Body,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Stop> {
        let unwritable = |source| Stop::Final(self.unwritable(source));
        let mut file = self.open_part(start).map_err(unwritable)?;
        let mut reader = body.into_reader();
        let mut buffer = vec![0; 1 << 16];
        let mut have = start;
        progress(have, self.size);
        loop {
            let n = match reader.read(&mut buffer) {
                Ok(0) if have == self.size => break,
                Ok(0) => {
                    return Err(Stop::Broken(format!("the connection ended after {have} bytes")));
                }
                Ok(n) => n,
                Err(e) => return Err(Stop::Broken(format!("{e} after {have} bytes"))),
            };
            have += n as u64;
            if have > self.size {
                return Err(Stop::Final(self.size_error(have)));
            }
            file.write_all(&buffer[..n]).map_err(unwritable)?;
            progress(have, self.size);
        }
        file.sync_all().map_err(unwritable)
    }

    /// Opens the part to append after its first `start` bytes.
    fn open_part(&self, start: u64) -> io::Result<File> {
        if let Some(folder) = self.part.parent() {
            fs::create_dir_all(folder)?;
        }
        let file = OpenOptions::new().append(true).create(true).open(&self.part)?;
        file.set_len(start)?;
        Ok(file)
    }

    fn check(&self, digest: &Digest<'_>) -> Result<(), DataError> {
        let got = digest
            .of_file(&self.part)
            .map_err(|source| DataError::Read { path: self.part.clone(), source })?;
        if got.eq_ignore_ascii_case(digest.expected()) {
            return Ok(());
        }
        let expected = digest.expected().to_owned();
        Err(DataError::Digest { url: self.url.to_owned(), expected, got })
    }

    fn finish(&self, to: &Path) -> Result<(), DataError> {
        fs::rename(&self.part, to)
            .map_err(|source| DataError::Write { path: to.to_owned(), source })
    }

    /// The bytes that are there; none without a part.
    fn part_len(&self) -> u64 {
        fs::metadata(&self.part).map_or(0, |data| data.len())
    }

    fn failed(&self, problem: String) -> DataError {
        DataError::Download { url: self.url.to_owned(), problem }
    }

    fn refused(&self, problem: &str) -> Stop {
        Stop::Final(self.failed(problem.to_owned()))
    }

    fn size_error(&self, got: u64) -> DataError {
        DataError::Size { url: self.url.to_owned(), expected: self.size, got }
    }

    fn unwritable(&self, source: io::Error) -> DataError {
        DataError::Write { path: self.part.clone(), source }
    }
}

/// The text of a header; empty without one.
fn text(response: &Response<Body>, name: header::HeaderName) -> &str {
    response.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}
