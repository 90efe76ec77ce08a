//! The token and the certificates of this task, from the files and the environment that name them.

use anyhow::Result;

use super::exit::Usage;
use crate::cluster::TaskId;
use crate::config::{ClusterConfig, TlsConfig};
use crate::rpc::Security;

/// The token where there is no file of it. Not a flag: everybody on a machine can read command lines.
const TOKEN: &str = "TFTRAIN_TOKEN";

/// What a task shows to the others and demands of them.
#[allow(clippy::disallowed_methods, reason = "the one place where the token is looked up")]
pub(super) fn security(config: &ClusterConfig, task: &TaskId) -> Result<Security> {
    let own = |file: &str| {
        let file = file.replace("{job}", &task.job).replace("{index}", &task.index.to_string());
        std::fs::read_to_string(&file).map_err(|e| Usage(format!("cannot read {file}: {e}")))
    };
    let mut security = Security::default();
    if let Some(file) = &config.token_file {
        security = security.with_token(&own(file)?)?;
    } else if let Some(token) = std::env::var_os(TOKEN) {
        security = security.with_token(&token.to_string_lossy())?;
    }
    match &config.tls {
        TlsConfig { ca: None, cert: None, key: None } => Ok(security),
        TlsConfig { ca: Some(ca), cert: Some(cert), key: Some(key) } => {
            Ok(security.with_tls(&own(ca)?, &own(cert)?, &own(key)?)?)
        }
        _ => Err(Usage(
            "mutual TLS needs all of --tls-ca, --tls-cert and --tls-key (`cluster.tls`: ca, cert, key)"
                .to_owned(),
        )
        .into()),
    }
}
