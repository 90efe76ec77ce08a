//! The door of a server: connections come in once they have shown that they speak its protocol.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;

/// How HTTP/2 begins (RFC 9113, section 3.4).
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How TLS begins: a handshake record of version 3.x (RFC 8446, section 5.1).
const TLS: &[u8] = &[22, 3];

/// How long a connection may take to say so.
const PATIENCE: Duration = Duration::from_secs(5);

/// The pause before looking again at a beginning that is not whole.
pub(super) const GLANCE: Duration = Duration::from_millis(20);

/// Connections that came in and are not taken up yet.
const WAITING: usize = 16;

/// Tells the log who was refused, at most once a second however many there are.
#[derive(Clone, Default)]
pub(super) struct Refusals(Arc<Mutex<Told>>);

#[derive(Default)]
struct Told {
    last: Option<Instant>,
    /// Refused since then.
    untold: u64,
}

impl Refusals {
    pub(super) fn tell(&self, from: Option<SocketAddr>, why: &str) {
        let mut told = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if told.last.is_some_and(|last| last.elapsed() < Duration::from_secs(1)) {
            told.untold += 1;
            return;
        }
        let from = from.map_or("somebody".to_owned(), |from| from.to_string());
        match told.untold {
            0 => tracing::warn!("refused {from}: {why}"),
            n => tracing::warn!("refused {from}: {why}; and {n} more before"),
        }
        *told = Told { last: Some(Instant::now()), untold: 0 };
    }
}

/// Accepts connections until the stream is dropped. One that is silent or speaks something else holds up nobody: it is logged
/// and closed.
pub(super) fn open(
    listener: TcpListener,
    encrypted: bool,
    refusals: Refusals,
) -> ReceiverStream<io::Result<TcpStream>> {
    let (admit, admitted) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = admit.closed() => return,
            };
            match accepted {
                Ok((stream, from)) => {
                    // A small answer waits for nothing; the builder's setting is for its own listeners.
                    let _ = stream.set_nodelay(true);
                    let (admit, refusals) = (admit.clone(), refusals.clone());
                    tokio::spawn(async move {
                        match greeting(&stream, if encrypted { TLS } else { HTTP2 }).await {
                            // Nobody takes it up when the server has ended.
                            Ok(()) => _ = admit.send(Ok(stream)).await,
                            Err(why) => refusals.tell(Some(from), &why.to_string()),
                        }
                    });
                }
                Err(error) => {
                    // Such as too many open files, which others must close first.
                    refusals.tell(None, &error.to_string());
                    tokio::time::sleep(GLANCE).await;
                }
            }
        }
    });
    ReceiverStream::new(admitted)
}

/// Waits for the beginning of the protocol, and leaves it to be read.
async fn greeting(stream: &TcpStream, wanted: &[u8]) -> io::Result<()> {
    let mut seen = [0; HTTP2.len()];
    let whole = async {
        loop {
            let n = stream.peek(&mut seen[..wanted.len()]).await?;
            if n == 0 {
                return Err(io::Error::other("it left without a word"));
            }
            if seen[..n] != wanted[..n] {
                let what = if wanted == TLS { "TLS" } else { "gRPC, or it does with TLS" };
                return Err(io::Error::other(format!("it does not speak {what}")));
            }
            if n == wanted.len() {
                return Ok(());
            }
            tokio::time::sleep(GLANCE).await;
        }
    };
    let late = io::Error::other(format!("it said too little within {} s", PATIENCE.as_secs()));
    tokio::time::timeout(PATIENCE, whole).await.unwrap_or(Err(late))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use tokio_stream::StreamExt;

    use super::*;

    #[test]
    fn only_who_speaks_the_protocol_comes_in() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = listener.local_addr().unwrap();
            let mut admitted = open(listener, false, Refusals::default());
            let say = |bytes: &[u8]| {
                let mut stream = std::net::TcpStream::connect(address).unwrap();
                stream.write_all(bytes).unwrap();
                stream
            };
            let others: Vec<_> =
                [&b""[..], b"PRI", b"GET / HTTP/1.1\r\n\r\n", &[22, 3, 1, 0], &[0xff; 4096]]
                    .map(say)
                    .into();
            let wanted = say(HTTP2);
            let stream = admitted.next().await.unwrap().unwrap();
            assert_eq!(stream.peer_addr().unwrap(), wanted.local_addr().unwrap());
            drop(others);
        });
    }
}
