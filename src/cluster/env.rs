//! [`find`]: what the environment says of a task's place.

use crate::cluster::{ClusterError, ClusterSpec, TaskId, launcher, tf_config};

/// What an environment variable holds, if it is set.
pub type Lookup<'a> = &'a dyn Fn(&str) -> Option<String>;

/// What one source in the environment says; what it leaves open is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// `TF_CONFIG`, `torchrun`, `Open MPI` or `Slurm`.
    pub source: &'static str,
    /// The addresses: those of `TF_CONFIG`, or derived from a launcher's rank.
    pub spec: Option<ClusterSpec>,
    /// This process's task.
    pub task: Option<TaskId>,
    /// Rank and number of ranks, from a launcher.
    pub world: Option<(u32, u32)>,
    /// Rank among the processes on this host, which chooses the GPU.
    pub local_rank: Option<u32>,
}

/// What the environment says: `TF_CONFIG` first, then one launcher. Launchers nest (Slurm starts
/// torchrun's agents), so the innermost speaks: torchrun, Open MPI, Slurm.
pub fn find(env: Lookup<'_>) -> Result<Vec<Found>, ClusterError> {
    // Unset and empty mean the same.
    let env = &|name: &str| env(name).filter(|value| !value.trim().is_empty());
    let launched = match launcher::torchrun(env)? {
        None => launcher::open_mpi(env)?,
        found => found,
    };
    let launched = match launched {
        None => launcher::slurm(env)?,
        found => found,
    };
    Ok(tf_config::tf_config(env)?.into_iter().chain(launched).collect())
}
