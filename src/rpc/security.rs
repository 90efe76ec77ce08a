//! Who may speak: [`Security`], what a task shows to the others and demands of them.

use std::error::Error;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use subtle::ConstantTimeEq;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{
    Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Server, ServerTlsConfig,
};
use tonic::{Request, Status};

use super::RpcError;
use super::door::Refusals;
use crate::cluster::TaskId;

/// The metadata key of the token.
const TOKEN: &str = "authorization";

/// How long a TLS handshake may take.
const HANDSHAKE: Duration = Duration::from_secs(5);

/// A connection that shows the token with every call.
pub(super) type Line = InterceptedService<Channel, Credentials>;

/// What a task shows to the others and demands of them: nothing, a token that all share, certificates of one authority, or both.
#[derive(Clone, Default)]
pub struct Security {
    token: Option<MetadataValue<Ascii>>,
    tls: Option<Tls>,
    /// Whether an open task may be reached from other hosts.
    exposed: bool,
}

#[derive(Clone)]
struct Tls {
    authority: Certificate,
    identity: Identity,
}

impl Security {
    /// Adds a token: visible ASCII, blanks around it do not count.
    ///
    /// # Errors
    /// [`RpcError::Credentials`] where it is empty or has other characters.
    pub fn with_token(mut self, token: &str) -> Result<Self, RpcError> {
        let token = token.trim();
        if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let text = "a token is one word of visible ASCII characters";
            return Err(RpcError::Credentials(text.to_owned()));
        }
        let mut value: MetadataValue<Ascii> = format!("Bearer {token}")
            .parse()
            .map_err(|_| RpcError::Credentials("the token cannot be sent".to_owned()))?;
        value.set_sensitive(true);
        self.token = Some(value);
        Ok(self)
    }

    /// Lets others reach a task that demands nothing of them.
    pub fn exposed(mut self) -> Self {
        self.exposed = true;
        self
    }

    /// Whether others must show something.
    pub fn demands(&self) -> bool {
        self.token.is_some() || self.tls.is_some()
    }

    /// Adds mutual TLS, from PEM texts: the authority's certificate, and this task's with its key.
    ///
    /// # Errors
    /// [`RpcError::Credentials`] where they are no certificates or do not belong together.
    pub fn with_tls(mut self, authority: &str, cert: &str, key: &str) -> Result<Self, RpcError> {
        let unusable = |error: tonic::transport::Error| {
            let reason = root_cause(&error);
            RpcError::Credentials(format!("the certificates or the key cannot be used: {reason}"))
        };
        let (authority, identity) =
            (Certificate::from_pem(authority), Identity::from_pem(cert, key));
        self.tls = Some(Tls { authority, identity });
        self.server().and_then(|_| self.endpoint("localhost:1")).map_err(unusable)?;
        Ok(self)
    }

    /// The addresses that a task may listen on.
    ///
    /// # Errors
    /// [`RpcError::Listen`] for a name that does not resolve, [`RpcError::Exposed`] where others could reach an open task.
    pub(super) fn admit(&self, task: &TaskId, address: &str) -> Result<Vec<SocketAddr>, RpcError> {
        let (task, address) = (task.clone(), address.to_owned());
        let mut tries = 0;
        let resolved: Vec<SocketAddr> = loop {
            match address.to_socket_addrs() {
                Ok(resolved) => break resolved.collect(),
                Err(error) if tries == RESOLVE_TRIES => {
                    return Err(RpcError::Listen { task, address, reason: error.to_string() });
                }
                // A name server may hear late of a host that has just started.
                Err(_) => std::thread::sleep(RESOLVE_PAUSE),
            }
            tries += 1;
        };
        let open = !self.demands() && !self.exposed;
        let local = resolved.iter().all(|address| address.ip().to_canonical().is_loopback());
        if open && !local {
            return Err(RpcError::Exposed { task, address });
        }
        Ok(resolved)
    }

    /// A server that demands certificates where there is an authority.
    pub(super) fn server(&self) -> Result<Server, tonic::transport::Error> {
        let Some(Tls { authority, identity }) = &self.tls else { return Ok(Server::builder()) };
        let tls = ServerTlsConfig::new().identity(identity.clone());
        Server::builder().tls_config(tls.client_ca_root(authority.clone()).timeout(HANDSHAKE))
    }

    /// The way to another task, whose certificate must be for the host of this address.
    pub(super) fn endpoint(&self, address: &str) -> Result<Endpoint, tonic::transport::Error> {
        let Some(Tls { authority, identity }) = &self.tls else {
            return Endpoint::from_shared(format!("http://{address}"));
        };
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
        let tls = ClientTlsConfig::new()
            .ca_certificate(authority.clone())
            .identity(identity.clone())
            .domain_name(host.trim_matches(['[', ']']))
            .timeout(HANDSHAKE);
        Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls)
    }

    /// Whether connections are encrypted.
    pub(super) fn encrypts(&self) -> bool {
        self.tls.is_some()
    }

    /// What shows the token with every call.
    pub(super) fn credentials(&self) -> Credentials {
        Credentials(self.token.clone())
    }

    /// What demands the token of every call.
    pub(super) fn guard(&self, refusals: Refusals) -> Guard {
        Guard { token: self.token.clone(), refusals }
    }
}

/// How often a task asks again for its own address, and the pause before.
const RESOLVE_TRIES: u32 = 20;
const RESOLVE_PAUSE: Duration = Duration::from_millis(500);

/// Adds the token to every call.
#[derive(Clone)]
pub(super) struct Credentials(Option<MetadataValue<Ascii>>);

impl Interceptor for Credentials {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &self.0 {
            request.metadata_mut().insert(TOKEN, token.clone());
        }
        Ok(request)
    }
}

/// Refuses calls without the token, before anything of them is read.
#[derive(Clone)]
pub(super) struct Guard {
    token: Option<MetadataValue<Ascii>>,
    refusals: Refusals,
}

impl Interceptor for Guard {
    fn call(&mut self, request: Request<()>) -> Result<Request<()>, Status> {
        let Some(token) = &self.token else { return Ok(request) };
        let fault = match request.metadata().get(TOKEN) {
            // In constant time, so that nobody can guess it letter by letter.
            Some(shown) if bool::from(shown.as_bytes().ct_eq(token.as_bytes())) => {
                return Ok(request);
            }
            Some(_) => "wrong token",
            None => "no token",
        };
        self.refusals.tell(request.remote_addr(), fault);
        Err(Status::unauthenticated(format!(
            "{fault}; give every task the same --token-file or TFTRAIN_TOKEN"
        )))
    }
}

/// Why a certificate was refused, here or by the other side; `None` for any other error.
pub(super) fn bad_certificate(error: &(dyn Error + 'static)) -> Option<String> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        // The kind under which TLS reports every fault of the protocol.
        let inner = error.downcast_ref::<io::Error>();
        if inner.is_some_and(|error| error.kind() == io::ErrorKind::InvalidData) {
            return Some(format!("the certificates do not agree: {}", root_cause(error)));
        }
        cause = error.source();
    }
    None
}

/// The innermost cause: `Connection refused` instead of `transport error`.
pub(super) fn root_cause(error: &dyn Error) -> String {
    let mut cause = error;
    while let Some(inner) = cause.source() {
        cause = inner;
    }
    cause.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task() -> TaskId {
        TaskId::new("worker", 1)
    }

    #[test]
    fn open_tasks_stay_on_loopback() {
        let open = Security::default();
        for address in ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
            assert!(open.admit(&task(), address).is_ok(), "{address}");
        }
        let token = Security::default().with_token("secret\n").unwrap();
        for address in ["0.0.0.0:1", "[::]:1", "10.1.2.3:1", "[2001:db8::1]:1"] {
            let error = open.admit(&task(), address).unwrap_err();
            assert_eq!(error.code(), 8, "{error}");
            assert!(error.to_string().contains("--token-file"), "{error}");
            assert!(token.admit(&task(), address).is_ok(), "{address}");
        }
    }

    #[test]
    fn a_token_is_one_word() {
        for bad in ["", " \n", "two words", "a\nb", "schlüssel"] {
            let refused = Security::default().with_token(bad);
            assert!(matches!(refused, Err(RpcError::Credentials(_))), "{bad:?}");
        }
    }

    #[test]
    fn only_the_same_token_passes() {
        let of = |token: &str| Security::default().with_token(token).unwrap();
        let mut guard = of("secret").guard(Refusals::default());
        let mut ask = |security: &Security| {
            guard.call(security.credentials().call(Request::new(())).unwrap()).map(drop)
        };
        assert!(ask(&of(" secret ")).is_ok());
        for other in [of("secreT"), of("secrets"), of("s"), Security::default()] {
            assert_eq!(ask(&other).unwrap_err().code(), tonic::Code::Unauthenticated);
        }
        assert!(Security::default().guard(Refusals::default()).call(Request::new(())).is_ok());
    }

    #[test]
    fn what_is_no_certificate_is_refused() {
        let error = Security::default().with_tls("a", "b", "c").err().unwrap();
        assert_eq!(error.code(), 2, "{error}");
    }
}
