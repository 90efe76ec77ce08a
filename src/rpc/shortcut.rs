//! The short way between two tasks on one host: beside each TCP address a Unix socket, by which a byte costs half the processor time.
//!
//! Its name is made of the address and lies in no folder (unix(7), "abstract"): it is found exactly where both tasks see the same
//! network, and nothing needs to be configured. Anybody on the host may take a name, so both ends speak to their own user only;
//! everybody else meets by TCP.

use std::future::{Ready, ready};
use std::io;
use std::net::SocketAddr;
use std::os::unix::net::UnixListener;
use std::task::{Context, Poll};

use hyper_util::rt::TokioIo;
use tokio::net::{UnixStream, lookup_host};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::Service;
use tonic::codegen::http::Uri;

use super::door::GLANCE;

/// Connections that came in and are not taken up yet.
const WAITING: usize = 16;

/// The name of the socket beside a TCP address.
#[cfg(target_os = "linux")]
fn name(address: SocketAddr) -> io::Result<std::os::unix::net::SocketAddr> {
    use std::os::linux::net::SocketAddrExt;
    std::os::unix::net::SocketAddr::from_abstract_name(format!("tftrain {address}"))
}

/// Other systems have no sockets without a folder.
#[cfg(not(target_os = "linux"))]
fn name(_: SocketAddr) -> io::Result<std::os::unix::net::SocketAddr> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Whether the other end is a process of this one's user.
fn is_own(stream: &UnixStream) -> io::Result<bool> {
    let (own, _) = UnixStream::pair()?;
    Ok(stream.peer_cred()?.uid() == own.peer_cred()?.uid())
}

/// Listens beside `address`.
pub(super) fn listen(address: SocketAddr) -> io::Result<UnixListener> {
    let listener = UnixListener::bind_addr(&name(address)?)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Accepts connections of the same user until the stream is dropped.
pub(super) fn open(listener: Option<UnixListener>) -> ReceiverStream<io::Result<UnixStream>> {
    let (admit, admitted) = mpsc::channel(WAITING);
    tokio::spawn(async move {
        let listener = listener.and_then(|listener| {
            let listener = tokio::net::UnixListener::from_std(listener);
            listener.inspect_err(|error| tracing::warn!("TCP only, as {error}")).ok()
        });
        let Some(listener) = listener else { return admit.closed().await };
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                () = admit.closed() => return,
            };
            match accepted.and_then(|(stream, _)| Ok((is_own(&stream)?, stream))) {
                Ok((true, stream)) => _ = admit.send(Ok(stream)).await,
                Ok((false, _)) => tracing::warn!("refused a process of another user"),
                // Such as too many open files, which others must close first.
                Err(error) => {
                    tracing::warn!("refused somebody: {error}");
                    tokio::time::sleep(GLANCE).await;
                }
            }
        }
    });
    ReceiverStream::new(admitted)
}

/// The short way to `host:port`, where there is one.
pub(super) async fn find(address: &str) -> Option<Shortcut> {
    for address in lookup_host(address).await.ok()? {
        let found = name(address).and_then(|name| {
            let stream = std::os::unix::net::UnixStream::connect_addr(&name)?;
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        });
        match found {
            Ok(stream) if is_own(&stream).unwrap_or(false) => return Some(Shortcut(Some(stream))),
            _ => {}
        }
    }
    None
}

/// A connection that is there already, for tonic, which wants to make one. Once it breaks the peer is lost, as by TCP.
pub(super) struct Shortcut(Option<UnixStream>);

impl Shortcut {
    /// The connection itself.
    pub(super) fn into_stream(self) -> Option<UnixStream> {
        self.0
    }
}

impl Service<Uri> for Shortcut {
    type Response = TokioIo<UnixStream>;
    type Error = io::Error;
    type Future = Ready<io::Result<Self::Response>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        ready(self.0.take().map(TokioIo::new).ok_or_else(|| io::ErrorKind::NotConnected.into()))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;
    use tokio_stream::StreamExt;

    use super::*;

    #[test]
    fn it_is_there_while_somebody_listens_beside_the_address() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let tcp = TcpListener::bind("127.0.0.1:0").await.unwrap();
            let address = tcp.local_addr().unwrap();
            assert!(find(&address.to_string()).await.is_none());
            let mut admitted = open(Some(listen(address).unwrap()));
            assert!(listen(address).is_err(), "the name is taken");
            let mut there = find(&address.to_string()).await.unwrap();
            let mut here = admitted.next().await.unwrap().unwrap();
            let mut connected = there.call(Uri::default()).await.unwrap().into_inner();
            connected.write_all(b"by the short way").await.unwrap();
            drop(connected);
            let mut said = String::new();
            here.read_to_string(&mut said).await.unwrap();
            assert_eq!(said, "by the short way");
            assert!(there.call(Uri::default()).await.is_err(), "it connects once");
            drop(admitted);
            while find(&address.to_string()).await.is_some() {
                tokio::task::yield_now().await;
            }
        });
    }
}
