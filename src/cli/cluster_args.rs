//! The flags of a task of a cluster, as typed.

use clap::Args;

#[derive(Debug, Default, Args)]
pub(crate) struct ClusterArgs {
    /// Addresses of the parameter servers, with commas between them
    #[arg(long, value_name = "HOST:PORT,...")]
    pub(crate) ps_hosts: Option<String>,
    /// Addresses of the workers, with commas between them
    #[arg(long, value_name = "HOST:PORT,...")]
    pub(crate) worker_hosts: Option<String>,
    /// This process's job: ps, worker, chief, evaluator, or any of the cluster's own
    #[arg(long, value_name = "JOB")]
    pub(crate) job_name: Option<String>,
    /// This process's index in its job
    #[arg(long, value_name = "N")]
    pub(crate) task_index: Option<u32>,
    /// File with the token that all tasks share [TFTRAIN_TOKEN]
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<String>,
    /// Certificate of the authority, for mutual TLS
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_ca: Option<String>,
    /// This task's certificate; {job} and {index} stand for its own
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_cert: Option<String>,
    /// The key of this task's certificate
    #[arg(long, value_name = "FILE")]
    pub(crate) tls_key: Option<String>,
    /// Let everybody who reaches this task use it by TensorFlow's protocol, which knows neither tokens nor certificates
    #[arg(long)]
    pub(crate) insecure_sessions: bool,
    /// Seconds to wait for the other tasks at the start, and for a parameter server that died
    #[arg(long, value_name = "SECS", default_value_t = 60)]
    pub(crate) rendezvous_timeout: u64,
    /// Seconds without any movement after which a task says where it stands; 0 for never
    #[arg(long, value_name = "SECS", default_value_t = 60)]
    pub(crate) stall_timeout: u64,
}
