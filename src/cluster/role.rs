//! [`Role`]: what a task of a cluster is there for, and the order in which workers share the data.

use std::fmt;

use crate::cluster::{ClusterError, ClusterSpec, TaskId};

/// What a task does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Holds variables.
    Ps,
    /// Trains.
    Worker,
    /// Trains, and also initialises, saves and writes summaries.
    Chief,
    /// Evaluates checkpoints; may stand outside the cluster.
    Evaluator,
    /// A job of the user's own; serves only.
    Other,
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Ps => "ps",
            Role::Worker => "worker",
            Role::Chief => "chief",
            Role::Evaluator => "evaluator",
            Role::Other => "serves only",
        })
    }
}

/// The jobs whose task is chief: today's name and the legacy one.
const CHIEF_JOBS: [&str; 2] = ["chief", "master"];

impl ClusterSpec {
    /// What a task is in this cluster.
    pub fn role(&self, task: &TaskId) -> Role {
        match task.job.as_str() {
            _ if self.chief().as_ref() == Some(task) => Role::Chief,
            "ps" => Role::Ps,
            "worker" => Role::Worker,
            "evaluator" => Role::Evaluator,
            _ => Role::Other,
        }
    }

    /// The task of the job `chief` (or `master`), else worker 0, if there is one.
    pub fn chief(&self) -> Option<TaskId> {
        let worker_0 = TaskId::new("worker", 0);
        let named = CHIEF_JOBS.iter().find_map(|job| self.tasks(job).next());
        let worker_0 = || self.address(&worker_0).map(|_| worker_0.clone());
        named.map(|(task, _)| task).or_else(worker_0)
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
        assert_eq!(plain.role(&TaskId::new("worker", 0)), Role::Chief);
        assert_eq!(plain.role(&TaskId::new("worker", 1)), Role::Worker);
        for job in CHIEF_JOBS {
            let spec = ClusterSpec::loopback(&[(job, 1), ("worker", 2), ("mine", 1)]);
            assert_eq!(names(spec.training_tasks()), [&format!("{job}:0"), "worker:0", "worker:1"]);
            assert_eq!(spec.role(&TaskId::new(job, 0)), Role::Chief);
            assert_eq!(spec.role(&TaskId::new("worker", 0)), Role::Worker);
            assert_eq!(spec.role(&TaskId::new("ps", 0)), Role::Ps);
            assert_eq!(spec.role(&TaskId::new("evaluator", 9)), Role::Evaluator);
            assert_eq!(spec.role(&TaskId::new("mine", 0)), Role::Other);
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
