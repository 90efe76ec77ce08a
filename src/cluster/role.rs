//! What the jobs of a cluster are there for by their names, and the order in which workers share the data.

use crate::cluster::{ClusterError, ClusterSpec, TaskId};

/// The jobs whose task is chief: today's name and the legacy one.
const CHIEF_JOBS: [&str; 2] = ["chief", "master"];

/// The job that evaluates checkpoints; its tasks may stand outside the cluster.
pub const EVALUATOR: &str = "evaluator";

/// The job of the process that trains with towers that only serve, where no task is named chief. It stands outside the
/// cluster, as nobody calls it.
pub const CLIENT: &str = "client";

impl ClusterSpec {
    /// The task of the job `chief` (or `master`), else worker 0, if there is one.
    pub fn chief(&self) -> Option<TaskId> {
        let worker_0 = TaskId::new("worker", 0);
        let worker_0 = || self.address(&worker_0).map(|_| worker_0.clone());
        self.named_chief().or_else(worker_0)
    }

    /// The task of the job `chief` (or `master`).
    fn named_chief(&self) -> Option<TaskId> {
        CHIEF_JOBS.iter().find_map(|job| self.tasks(job).next()).map(|(task, _)| task)
    }

    /// Who trains where all others only serve.
    pub fn client(&self) -> TaskId {
        self.named_chief().unwrap_or_else(|| TaskId::new(CLIENT, 0))
    }

    /// The tasks that compute for a [`client`](Self::client): of all jobs, whatever their names, but those with another
    /// purpose.
    pub fn serving_tasks(&self) -> Vec<TaskId> {
        let other = |job: &str| job == "ps" || job == EVALUATOR || CHIEF_JOBS.contains(&job);
        self.all().map(|(task, _)| task).filter(|task| !other(&task.job)).collect()
    }

    /// The tasks that train: the chief, then the workers by index. The position here is the global
    /// worker id; data is sharded by it, as chief 0 and worker 0 have the same index.
    pub fn training_tasks(&self) -> Vec<TaskId> {
        let chief = self.chief();
        let workers = self.tasks("worker").map(|(task, _)| task);
        let others: Vec<_> = workers.filter(|task| Some(task) != chief.as_ref()).collect();
        chief.into_iter().chain(others).collect()
    }

    /// The parameter servers, by index.
    pub fn ps_tasks(&self) -> Vec<TaskId> {
        self.tasks("ps").map(|(task, _)| task).collect()
    }

    /// An error if several tasks claim to be chief.
    pub(crate) fn check_one_chief(&self) -> Result<(), ClusterError> {
        let chiefs = CHIEF_JOBS.iter().flat_map(|job| self.tasks(job));
        let chiefs: Vec<_> = chiefs.map(|(task, _)| task.to_string()).collect();
        if chiefs.len() > 1 {
            return Err(ClusterError::ManyChiefs(chiefs.join(", ")));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(tasks: Vec<TaskId>) -> Vec<String> {
        tasks.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn worker_0_is_chief_unless_there_is_one() {
        let plain = ClusterSpec::loopback(&[("ps", 2), ("worker", 3)]);
        assert_eq!(names(plain.training_tasks()), ["worker:0", "worker:1", "worker:2"]);
        assert_eq!(names(plain.ps_tasks()), ["ps:0", "ps:1"]);
        assert_eq!(names(plain.serving_tasks()), ["worker:0", "worker:1", "worker:2"]);
        assert_eq!(plain.client().to_string(), "client:0");
        for job in CHIEF_JOBS {
            let spec = ClusterSpec::loopback(&[(job, 1), ("worker", 2), ("mine", 1)]);
            assert_eq!(names(spec.training_tasks()), [&format!("{job}:0"), "worker:0", "worker:1"]);
            assert_eq!(names(spec.serving_tasks()), ["mine:0", "worker:0", "worker:1"]);
            assert_eq!(spec.client(), TaskId::new(job, 0));
        }
    }

    #[test]
    fn a_cluster_may_lack_a_chief_but_not_have_two() {
        let sparse = ClusterSpec::from_maps([("worker", [(2, "b:1"), (1, "a:1")])]).unwrap();
        assert_eq!(sparse.chief(), None);
        assert_eq!(names(sparse.training_tasks()), ["worker:1", "worker:2"]);
        let error = ClusterSpec::loopback(&[("chief", 1), ("master", 1)]).check_one_chief();
        assert_eq!(
            error.unwrap_err().to_string(),
            "the cluster must have only one \"chief\" node, it has chief:0, master:0"
        );
    }
}
