//! The cluster's settings.

use serde::{Deserialize, Serialize};

use super::choice::{ClusterMode, Engine, Exchange, Placement, Wire};
use crate::cluster::ClusterSpec;

/// Who trains together, and how. Without jobs there is no cluster.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ClusterConfig {
    /// The addresses of every task, by job; in YAML each job is a key of `cluster` itself.
    pub jobs: ClusterSpec,
    /// How the tasks train together.
    pub mode: ClusterMode,
    /// Gradients of a synchronous update; `None` means one of every worker. Fewer make backup workers of the rest.
    pub replicas_to_aggregate: Option<u64>,
    /// How many updates old an asynchronous gradient may be; `None` = any.
    pub max_staleness: Option<u64>,
    /// Which parameter server holds what.
    pub placement: Placement,
    /// Who carries gradients in a collective.
    pub engine: Engine,
    /// Which way gradients take in a collective.
    pub exchange: Exchange,
    /// How the floats of gradients travel in a collective.
    pub wire: Wire,
    /// Whether finished gradients are exchanged while others are still being computed.
    pub overlap: bool,
    /// Any word that tells this run from others at the same addresses; `None` = none.
    pub run_id: Option<String>,
    /// File with the token that all tasks share; `None` = none.
    pub token_file: Option<String>,
    /// Certificates.
    pub tls: TlsConfig,
}

/// PEM files of mutual TLS, all three or none. `{job}` and `{index}` in a name stand for those of the task, so that one
/// configuration serves all.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TlsConfig {
    /// The certificate of the authority whose certificates count.
    pub ca: Option<String>,
    /// This task's certificate.
    pub cert: Option<String>,
    /// Its key.
    pub key: Option<String>,
}

impl Default for ClusterConfig {
    fn default() -> Self {
        Self {
            jobs: ClusterSpec::default(),
            mode: ClusterMode::PsSync,
            replicas_to_aggregate: None,
            max_staleness: None,
            placement: Placement::Even,
            engine: Engine::Auto,
            exchange: Exchange::Direct,
            wire: Wire::F32,
            overlap: true,
            run_id: None,
            token_file: None,
            tls: TlsConfig::default(),
        }
    }
}
