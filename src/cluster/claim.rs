//! [`Claim`]: what is said of this process's task, possibly in parts.

use std::fmt;

use crate::cluster::task_id::check_job;
use crate::cluster::{CLIENT, ClusterError, ClusterSpec, EVALUATOR, PlaceFlags, TaskId};

/// What is said of this process's task, and by whom.
#[derive(Default)]
pub(crate) struct Claim {
    pub(crate) job: Option<String>,
    pub(crate) index: Option<u32>,
    sources: Vec<&'static str>,
}

impl Claim {
    /// What the flags say.
    pub(crate) fn of_flags(flags: &PlaceFlags) -> Result<Self, ClusterError> {
        let job = flags.job_name.clone().filter(|job| !job.is_empty());
        job.as_deref().map_or(Ok(()), check_job)?;
        let mut sources = Vec::new();
        sources.extend(job.as_ref().map(|_| "--job-name"));
        sources.extend(flags.task_index.map(|_| "--task-index"));
        Ok(Self { job, index: flags.task_index, sources })
    }

    /// A whole task, from one source.
    pub(crate) fn of(source: &'static str, task: &TaskId) -> Self {
        Self { job: Some(task.job.clone()), index: Some(task.index), sources: vec![source] }
    }

    /// The sources, in one word.
    pub(crate) fn from(&self) -> String {
        self.sources.join("/")
    }

    /// The weaker claim fills what this one leaves open, and must agree in the rest.
    pub(crate) fn joined(mut self, weaker: Self) -> Result<Self, ClusterError> {
        fn differ<T: PartialEq>(a: &Option<T>, b: &Option<T>) -> bool {
            a.is_some() && b.is_some() && a != b
        }
        if differ(&self.job, &weaker.job) || differ(&self.index, &weaker.index) {
            return Err(ClusterError::Contradiction {
                first: self.from(),
                first_value: self.to_string(),
                second: weaker.from(),
                second_value: weaker.to_string(),
            });
        }
        if self.job.is_none() || self.index.is_none() {
            self.sources.extend(weaker.sources);
        }
        self.job = self.job.or(weaker.job);
        self.index = self.index.or(weaker.index);
        Ok(self)
    }

    /// The task; what nobody said is inferred where there is but one choice.
    pub(crate) fn task_in(&self, spec: &ClusterSpec) -> Result<TaskId, ClusterError> {
        let jobs: Vec<_> = spec.jobs().collect();
        let job = match (&self.job, &jobs[..]) {
            (Some(job), _) => job.as_str(),
            (None, [only]) => only,
            (None, _) => return Err(ClusterError::JobMissing { jobs: jobs.join(", ") }),
        };
        let outside = [EVALUATOR, CLIENT].contains(&job);
        let indices: Vec<_> = spec.tasks(job).map(|(task, _)| task.index).collect();
        if indices.is_empty() && !outside {
            return Err(ClusterError::UnknownJob {
                job: job.to_owned(),
                from: self.from(),
                jobs: jobs.join(", "),
                nearest: nearest(job, &jobs),
            });
        }
        let listed = || indices.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let index = match (self.index, &indices[..]) {
            // Who stands outside the cluster has no bound to its index.
            (Some(index), _) if outside || indices.contains(&index) => index,
            (Some(index), _) => {
                let (job, from) = (job.to_owned(), self.from());
                return Err(ClusterError::UnknownIndex { job, index, from, indices: listed() });
            }
            (None, []) => 0,
            (None, [only]) => *only,
            (None, _) => {
                return Err(ClusterError::IndexMissing { job: job.into(), indices: listed() });
            }
        };
        Ok(TaskId::new(job, index))
    }
}

impl fmt::Display for Claim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.job, self.index) {
            (Some(job), Some(index)) => write!(f, "{job}:{index}"),
            (Some(job), None) => write!(f, "job {job}"),
            (None, Some(index)) => write!(f, "task {index}"),
            (None, None) => f.write_str("no task"),
        }
    }
}

/// `; did you mean worker?`, if some job is at most two letters away.
fn nearest(job: &str, jobs: &[&str]) -> String {
    let known = jobs.iter().map(|known| (edits(job, known), known)).min();
    let near = known.filter(|&(distance, known)| distance <= 2 && distance < known.len());
    near.map_or(String::new(), |(_, known)| format!("; did you mean {known}?"))
}

/// Levenshtein's distance, one row of the table at a time.
fn edits(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}
