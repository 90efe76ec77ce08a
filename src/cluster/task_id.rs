//! [`TaskId`]: one process of a cluster, `worker:1`.

use std::fmt;
use std::str::FromStr;

use crate::cluster::ClusterError;

/// One task of a cluster. The order, by job name and then by index, is the fixed order of tasks
/// wherever one is needed (sums, listings).
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId {
    /// `ps`, `worker`, `chief`, or any other job.
    pub job: String,
    /// Index within the job.
    pub index: u32,
}

impl TaskId {
    /// The task `job:index`.
    pub fn new(job: impl Into<String>, index: u32) -> Self {
        Self { job: job.into(), index }
    }
}

impl fmt::Display for TaskId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.job, self.index)
    }
}

impl FromStr for TaskId {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Self, ClusterError> {
        let bad = || ClusterError::TaskId(text.to_owned());
        let (job, index) = text.split_once(':').ok_or_else(bad)?;
        check_job(job)?;
        Ok(Self::new(job, parse_index(index).ok_or_else(bad)?))
    }
}

/// Job names are `[a-z][a-z0-9_]*`.
pub(crate) fn check_job(job: &str) -> Result<(), ClusterError> {
    let legal = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
    if job.starts_with(|c: char| c.is_ascii_lowercase()) && job.chars().all(legal) {
        return Ok(());
    }
    Err(ClusterError::JobName(job.to_owned()))
}

/// Digits only: `str::parse` alone would take `+1`.
pub(crate) fn parse_index(text: &str) -> Option<u32> {
    text.bytes().all(|b| b.is_ascii_digit()).then(|| text.parse().ok())?
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn refuses_what_is_no_task() {
        for bad in ["worker", "worker:", "worker:-1", "worker:+1", "worker:4294967296", "w:1:2"] {
            let error = bad.parse::<TaskId>().unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("'{bad}' is no task: write job:index, for example worker:1")
            );
        }
        for bad in [":1", "Worker:1", "1a:1", "wörker:0", "a-b:0"] {
            assert!(matches!(bad.parse::<TaskId>(), Err(ClusterError::JobName(_))), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn parse_undoes_print(job in "[a-z][a-z0-9_]{0,8}", index in any::<u32>()) {
            let task = TaskId::new(job, index);
            prop_assert_eq!(task.to_string().parse::<TaskId>().unwrap(), task);
        }
    }
}
