//! [`Duty`]: what a task of a cluster does, by the cluster's mode.

use crate::cluster::{ClusterError, ClusterSpec, EVALUATOR, Place, TaskId};
use crate::config::{ClusterMode, Origin, Reduce, Resolved, RunConfig, VariablePlacement, Wire};
use crate::ps::{Accumulator, Mode, Rounds, WhenShort};

/// What a task does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Duty {
    /// Holds variables for these tasks, the chief first.
    Variables(Vec<TaskId>),
    /// Computes gradients for this task, and nothing else.
    Towers(TaskId),
    /// Trains.
    Training(Training),
    /// Evaluates checkpoints.
    Evaluation,
    /// Answers TensorFlow's clients.
    Sessions,
}

/// With whom a task trains. It is connected to all tasks named here but itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Training {
    /// Its place among those who train.
    pub rank: usize,
    /// How many train.
    pub size: usize,
    /// Who gives the first values, saves and writes summaries.
    pub chief: TaskId,
    /// Those that hold the variables; none where each has its own.
    pub ps: Vec<TaskId>,
    /// Those that compute for this task; none where it computes itself.
    pub serving: Vec<TaskId>,
    /// Those it exchanges gradients with.
    pub equals: Vec<TaskId>,
    /// Whether the tasks with variables apply gradients in rounds.
    pub synchronous: bool,
}

/// A cluster whose mode nobody chose has the one that fits its jobs.
pub fn settle_mode(resolved: &mut Resolved, spec: &ClusterSpec) {
    let chosen = resolved.origins.get("cluster.mode").unwrap_or(&Origin::Default);
    if *chosen == Origin::Default && spec.ps_tasks().is_empty() {
        resolved.config.cluster.mode = ClusterMode::Collective;
    }
}

/// Whether a process that is given no task is the client of a cluster that serves.
pub fn has_client(config: &RunConfig) -> bool {
    config.cluster.mode == ClusterMode::InGraph
}

/// Whether a cluster needs no workers, and a process may be none of its tasks.
pub fn has_any_jobs(config: &RunConfig) -> bool {
    matches!(config.cluster.mode, ClusterMode::InGraph | ClusterMode::Session)
}

/// Whether tasks without towers have to know how many towers the others have.
pub fn towers_are_counted_elsewhere(config: &RunConfig) -> bool {
    config.cluster.mode != ClusterMode::Collective
}

/// The tasks whose towers' gradients make one update of a synchronous cluster.
pub fn computing_tasks(config: &RunConfig, spec: &ClusterSpec) -> Vec<TaskId> {
    match config.cluster.mode {
        ClusterMode::InGraph => spec.serving_tasks(),
        ClusterMode::PsSync | ClusterMode::PsAsync | ClusterMode::Collective => {
            spec.training_tasks()
        }
        ClusterMode::Session => Vec::new(),
    }
}

/// When a task with variables applies the gradients of `trainers` tasks.
pub fn update_mode(config: &RunConfig, trainers: usize) -> Mode {
    let max_staleness = config.cluster.max_staleness;
    match config.cluster.mode {
        ClusterMode::PsAsync => Mode::Async { workers: trainers, max_staleness },
        ClusterMode::PsSync
        | ClusterMode::Collective
        | ClusterMode::InGraph
        | ClusterMode::Session => {
            let aggregate = config.cluster.replicas_to_aggregate;
            let rounds = Rounds {
                workers: trainers,
                aggregate: aggregate.map_or(trainers, |n| n as usize),
                // Who lost another task comes back soon, so that none may be left for a moment.
                when_short: WhenShort::GoOn { min: 0 },
            };
            Mode::Sync(Accumulator::new(rounds, 0))
        }
    }
}

/// What the task of `place` does.
///
/// # Errors
/// A cluster that lacks what its mode needs, or has what it has no use for.
pub fn duty(config: &RunConfig, place: &Place) -> Result<Duty, ClusterError> {
    let (spec, task) = (&place.spec, &place.task);
    let mode = config.cluster.mode;
    let fail = |why: String| Err(ClusterError::Unfit { mode: mode.to_string(), why });
    let (ps, serving) = (spec.ps_tasks(), spec.serving_tasks());
    if mode == ClusterMode::Session {
        return match spec.address(task) {
            Some(_) => Ok(Duty::Sessions),
            None => fail("say which task this is: --job-name and --task-index".to_owned()),
        };
    }
    let replicated = config.variables == VariablePlacement::Replicated;
    match mode {
        _ if config.towers.asynchronous => {
            return fail("towers that do not wait share one process, without a cluster".to_owned());
        }
        _ if config.reduce == Reduce::None => {
            return fail("`reduce: none` is for one process, without a cluster".to_owned());
        }
        ClusterMode::PsSync | ClusterMode::PsAsync if ps.is_empty() => {
            return fail("the cluster has no ps tasks (--ps-hosts)".to_owned());
        }
        ClusterMode::Collective if !ps.is_empty() => {
            return fail(format!("the workers have the variables, nothing is left for {}", ps[0]));
        }
        ClusterMode::InGraph if serving.is_empty() => {
            return fail("the cluster has no tasks that serve (--worker-hosts)".to_owned());
        }
        ClusterMode::PsSync | ClusterMode::PsAsync | ClusterMode::InGraph
            if config.cluster.wire != Wire::F32 =>
        {
            let wire = config.cluster.wire;
            return fail(format!("`cluster.wire: {wire}` is for collectives, others send f32"));
        }
        ClusterMode::PsSync | ClusterMode::PsAsync | ClusterMode::InGraph if replicated => {
            return fail("there is one copy of the variables, `variables: cpu`".to_owned());
        }
        _ => {}
    }
    let client = spec.client();
    let trainers = match mode {
        ClusterMode::InGraph => vec![client.clone()],
        ClusterMode::PsSync | ClusterMode::PsAsync | ClusterMode::Collective => {
            spec.training_tasks()
        }
        ClusterMode::Session => Vec::new(),
    };
    if task.job == EVALUATOR {
        return Ok(Duty::Evaluation);
    }
    if ps.contains(task) {
        return Ok(Duty::Variables(trainers));
    }
    let Some(rank) = trainers.iter().position(|other| other == task) else {
        return match mode {
            ClusterMode::InGraph if serving.contains(task) => Ok(Duty::Towers(client)),
            _ => fail(format!("{task} neither trains nor holds variables")),
        };
    };
    let Some(chief) = trainers.first().cloned() else {
        return fail("nobody trains".to_owned());
    };
    let others = trainers.iter().filter(|other| *other != task).cloned().collect();
    Ok(Duty::Training(Training {
        rank,
        size: trainers.len(),
        chief,
        ps,
        serving: if mode == ClusterMode::InGraph { serving } else { Vec::new() },
        equals: if mode == ClusterMode::Collective { others } else { Vec::new() },
        synchronous: mode != ClusterMode::PsAsync,
    }))
}

impl Duty {
    /// Whether the task has towers of its own.
    pub fn computes(&self) -> bool {
        match self {
            Duty::Variables(_) | Duty::Evaluation | Duty::Sessions => false,
            Duty::Towers(_) => true,
            Duty::Training(training) => training.serving.is_empty(),
        }
    }

    /// In words, for the user.
    pub fn describe(&self, task: &TaskId) -> String {
        match self {
            Duty::Variables(_) => "holds variables".to_owned(),
            Duty::Towers(client) => format!("computes for {client}"),
            Duty::Evaluation => "evaluates checkpoints".to_owned(),
            Duty::Sessions => "answers TensorFlow's clients".to_owned(),
            Duty::Training(Training { rank, size, chief, serving, .. }) => {
                let who = if chief == task { "chief" } else { "worker" };
                match serving.len() {
                    0 => format!("{who}, global worker {rank} of {size}"),
                    n => format!("{who}, trains on {n} tasks that serve"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(mode: &str, cluster: &str, task: &str) -> Result<String, String> {
        with_wire(Wire::F32, mode, cluster, task)
    }

    fn with_wire(wire: Wire, mode: &str, cluster: &str, task: &str) -> Result<String, String> {
        let mut config = RunConfig::recipe("cifar10").unwrap();
        config.cluster.mode = serde_json::from_value(mode.into()).unwrap();
        config.cluster.wire = wire;
        let (spec, task): (ClusterSpec, TaskId) = (cluster.parse().unwrap(), task.parse().unwrap());
        let place = Place { spec, task, sources: Vec::new(), local_rank: None };
        let duty = duty(&config, &place).map_err(|error| error.to_string())?;
        Ok(duty.describe(&place.task))
    }

    #[test]
    fn a_job_does_what_the_mode_needs() {
        let full = r#"{"ps":["a:1"],"worker":["b:1","c:1"],"work":["d:1"],"evaluator":["e:1"]}"#;
        let say = |mode, task| of(mode, full, task);
        for mode in ["ps-sync", "ps-async", "in-graph"] {
            assert_eq!(say(mode, "ps:0").unwrap(), "holds variables");
            assert_eq!(say(mode, "evaluator:0").unwrap(), "evaluates checkpoints");
        }
        assert_eq!(say("ps-sync", "worker:0").unwrap(), "chief, global worker 0 of 2");
        assert_eq!(say("ps-async", "worker:1").unwrap(), "worker, global worker 1 of 2");
        assert_eq!(
            say("ps-sync", "work:0").unwrap_err(),
            "mode ps-sync: work:0 neither trains nor holds variables"
        );
        assert_eq!(say("in-graph", "worker:0").unwrap(), "computes for client:0");
        assert_eq!(say("in-graph", "work:0").unwrap(), "computes for client:0");
        assert_eq!(say("in-graph", "client:0").unwrap(), "chief, trains on 3 tasks that serve");
        let named = r#"{"chief":["a:1"],"worker":["b:1"]}"#;
        assert_eq!(of("in-graph", named, "worker:0").unwrap(), "computes for chief:0");
    }

    #[test]
    fn tasks_of_any_job_answer_clients() {
        let cluster = r#"{"ps":["a:1"],"work":["b:1"]}"#;
        for task in ["ps:0", "work:0"] {
            assert_eq!(of("session", cluster, task).unwrap(), "answers TensorFlow's clients");
        }
        let why = of("session", cluster, "client:0").unwrap_err();
        assert!(why.contains("--job-name"), "{why}");
    }

    #[test]
    fn a_cluster_without_what_its_mode_needs_is_refused() {
        let why = |mode, cluster| of(mode, cluster, "worker:0").unwrap_err();
        let workers = r#"{"worker":["b:1","c:1"]}"#;
        assert!(why("ps-async", workers).starts_with("mode ps-async: the cluster has no ps tasks"));
        assert!(
            why("collective", r#"{"ps":["a:1"],"worker":["b:1"]}"#).ends_with("is left for ps:0")
        );
        assert!(why("in-graph", r#"{"ps":["a:1"]}"#).contains("no tasks that serve"));
        let full = r#"{"ps":["a:1"],"worker":["b:1"]}"#;
        for mode in ["ps-sync", "ps-async", "in-graph"] {
            let why = with_wire(Wire::Bf16, mode, full, "worker:0").unwrap_err();
            assert!(why.contains("`cluster.wire: bf16` is for collectives"), "{why}");
        }
        assert!(with_wire(Wire::Bf16, "collective", workers, "worker:0").is_ok());
    }
}
