//! [`ClusterError`]: why a task's place in a cluster is not understood.

use crate::cluster::TaskId;

/// Everything that can be wrong with a cluster or a task's place in it; all are the user's to mend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClusterError {
    /// A job name outside `[a-z][a-z0-9_]*`.
    #[error("job name '{0}' is not a lower-case letter followed by letters, digits or '_'")]
    JobName(String),
    /// A text that names no task.
    #[error("'{0}' is no task: write job:index, for example worker:1")]
    TaskId(String),
    /// A text that describes no cluster.
    #[error("no cluster: {0}")]
    Spec(String),
    /// A job given twice.
    #[error("job {0} is given twice")]
    DuplicateJob(String),
    /// A job without tasks.
    #[error("job {0} is empty: give it addresses or leave it out")]
    EmptyJob(String),
    /// An index given twice in a job.
    #[error("{0} is given twice")]
    DuplicateTask(TaskId),
    /// An address that is not `host:port`.
    #[error("address '{address}' of {task}: {why}")]
    Address {
        /// Whose address.
        task: TaskId,
        /// As written.
        address: String,
        /// What is wrong with it.
        why: &'static str,
    },
    /// Two tasks at one address.
    #[error("{first} and {second} have the same address {address}: is one list a copy of another?")]
    DuplicateAddress {
        /// The task that comes first in the order of tasks.
        first: TaskId,
        /// The other.
        second: TaskId,
        /// In canonical form.
        address: String,
    },
    /// More than one task is chief.
    #[error("the cluster must have only one \"chief\" node, it has {0}")]
    ManyChiefs(String),
    /// Parameter servers with nobody to serve.
    #[error("job worker is empty: the cluster has ps tasks but no worker (--worker-hosts)")]
    NoWorkers,
    /// A cluster that its mode cannot use.
    #[error("mode {mode}: {why}")]
    Unfit {
        /// The mode.
        mode: String,
        /// What it lacks, or has no use for.
        why: String,
    },
    /// `TF_CONFIG` is not what TensorFlow defines.
    #[error("TF_CONFIG: {0}")]
    TfConfig(String),
    /// An environment variable with a bad value.
    #[error("{name}='{value}': {why}")]
    Variable {
        /// Its name.
        name: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
    /// An environment variable whose partner is missing.
    #[error("{set} is set but {unset} is not: set both or neither")]
    Unset {
        /// The one that is there.
        set: &'static str,
        /// The one that is not.
        unset: &'static str,
    },
    /// A base port so high that the last ranks are left without.
    #[error(
        "{size} ranks need a port each from {base} on, which is too high: set a lower MASTER_PORT"
    )]
    NoPorts {
        /// Rank 0's port.
        base: u32,
        /// Number of ranks.
        size: u32,
    },
    /// Two sources that cannot both be right.
    #[error("{first} says {first_value}, but {second} says {second_value}: correct or remove one")]
    Contradiction {
        /// The stronger source.
        first: String,
        /// What it says.
        first_value: String,
        /// The weaker source.
        second: String,
        /// What it says.
        second_value: String,
    },
    /// Several jobs, none chosen.
    #[error("the cluster has the jobs {jobs}: Must specify an explicit job_name (--job-name)")]
    JobMissing {
        /// The known jobs.
        jobs: String,
    },
    /// Several tasks in the job, none chosen.
    #[error(
        "job {job} has the tasks {indices}: Must specify an explicit task_index (--task-index)"
    )]
    IndexMissing {
        /// The chosen job.
        job: String,
        /// Its indices.
        indices: String,
    },
    /// A job that the cluster does not have.
    #[error(
        "{job} is not a valid task_type in the cluster_spec (from {from}): it has {jobs}{nearest}"
    )]
    UnknownJob {
        /// The job asked for.
        job: String,
        /// Who asked.
        from: String,
        /// The known jobs.
        jobs: String,
        /// `; did you mean worker?`, or nothing.
        nearest: String,
    },
    /// An index that the job does not have.
    #[error("{index} is not a valid task_id for task_type {job} (from {from}): it has {indices}")]
    UnknownIndex {
        /// The job.
        job: String,
        /// The index asked for.
        index: u32,
        /// Who asked.
        from: String,
        /// The job's indices.
        indices: String,
    },
    /// A task, but no cluster for it to be in.
    #[error(
        "{from} says {task}, but there is no cluster: give --ps-hosts and --worker-hosts, or \
         `cluster` in the configuration file"
    )]
    NoCluster {
        /// Who names the task.
        from: String,
        /// What was named.
        task: String,
    },
    /// A launcher that gave ranks, but not the hosts of the others.
    #[error(
        "{from} says rank {rank} of {size}, but not on which hosts: give every worker's address \
         with --worker-hosts or `cluster` in the configuration file"
    )]
    NoAddresses {
        /// The launcher.
        from: &'static str,
        /// This process's rank.
        rank: u32,
        /// Number of ranks.
        size: u32,
    },
}
