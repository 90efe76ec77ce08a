//! [`Place`]: which task of which cluster this process is, from flags, file and environment.

use std::collections::BTreeMap;

use crate::cluster::claim::Claim;
use crate::cluster::{CLIENT, ClusterError, ClusterSpec, EVALUATOR, Found, Lookup, TaskId, env};

/// The flags that tell a task its place, as typed. Empty texts mean "not given", as in TensorFlow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlaceFlags {
    /// `--ps-hosts`: addresses with commas between them.
    pub ps_hosts: Option<String>,
    /// `--worker-hosts`: likewise.
    pub worker_hosts: Option<String>,
    /// `--job-name`.
    pub job_name: Option<String>,
    /// `--task-index`.
    pub task_index: Option<u32>,
    /// Whether a process that nobody gives a task is the [`ClusterSpec::client`].
    pub client: bool,
}

/// A task's place in its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Everybody's address.
    pub spec: ClusterSpec,
    /// This process. In the cluster, unless it is an evaluator.
    pub task: TaskId,
    /// What came from where, as `worker from TF_CONFIG`.
    pub sources: Vec<String>,
    /// Its number among the processes of this host, where a launcher says so.
    pub local_rank: Option<u32>,
}

impl Place {
    /// Joins what flags, the configuration file (its name and its `cluster`) and the environment
    /// say; `None` if nobody speaks of a cluster.
    ///
    /// Where one is silent another is heard; where two speak they must agree. A launcher's ranks
    /// are the tasks of the cluster in order, unless the task is named and there are jobs besides
    /// chief and workers: then scripts map ranks to tasks in their own way, and only the number of
    /// tasks must agree.
    pub fn resolve(
        flags: &PlaceFlags,
        file: Option<(&str, &ClusterSpec)>,
        env: Lookup<'_>,
    ) -> Result<Option<Self>, ClusterError> {
        let found = env::find(env)?;
        let (launched, tf_config): (Vec<_>, Vec<_>) =
            found.into_iter().partition(|found| found.world.is_some());

        let mut layers = flag_layers(flags)?;
        layers.extend(file.map(|(name, spec)| (format!("`cluster` in {name}"), spec.clone())));
        let told = tf_config.iter().filter_map(|found| found.spec.clone());
        layers.extend(told.map(|spec| ("TF_CONFIG".to_owned(), spec)));
        layers.retain(|(_, spec)| !spec.is_empty());

        let mut claim = Claim::of_flags(flags)?;
        for found in &tf_config {
            // Without a cluster worker 0 means a local run.
            let local = layers.is_empty() && found.task == Some(TaskId::new("worker", 0));
            if let Some(task) = found.task.as_ref().filter(|_| !local) {
                claim = claim.joined(Claim::of("TF_CONFIG", task))?;
            }
        }
        let launched = launched.into_iter().find(|found| found.world.is_some_and(|w| w.1 > 1));
        if let Some(found) = &launched {
            if layers.is_empty() {
                layers.extend(found.spec.clone().map(|spec| (found.source.to_owned(), spec)));
            }
            if layers.is_empty() {
                let (rank, size) = found.world.unwrap_or_default();
                return Err(ClusterError::NoAddresses { from: found.source, rank, size });
            }
        }
        if layers.is_empty() {
            // TensorFlow's scripts default to --task_index=0 in local runs too.
            if claim.job.is_none() && claim.index.unwrap_or(0) == 0 {
                return Ok(None);
            }
            return Err(ClusterError::NoCluster { task: claim.to_string(), from: claim.from() });
        }

        let (spec, mut sources) = merged(&layers)?;
        spec.check_one_chief()?;
        if !flags.client && spec.training_tasks().is_empty() && !spec.ps_tasks().is_empty() {
            return Err(ClusterError::NoWorkers);
        }
        let local_rank = launched.as_ref().and_then(|found| found.local_rank);
        if let Some(found) = launched {
            claim = with_rank(claim, &found, &spec, &sources.join(", "))?;
        }
        let unsaid = claim.job.is_none() && claim.index.is_none();
        let (task, otherwise) = match unsaid && flags.client {
            true => (spec.client(), "no other being named"),
            false => (claim.task_in(&spec)?, "there being no other"),
        };
        let from = claim.from();
        let from = if from.is_empty() { otherwise } else { &from };
        sources.push(format!("{task} from {from}"));
        Ok(Some(Self { spec, task, sources, local_rank }))
    }

    /// This task's number among those of `tasks` that share its host, and how many these are.
    pub fn on_host(&self, tasks: &[TaskId]) -> (usize, usize) {
        let host = |task: &TaskId| {
            let address = self.spec.address(task).unwrap_or_default();
            address.rsplit_once(':').map_or(address, |(host, _)| host).to_owned()
        };
        let own = host(&self.task);
        let here: Vec<&TaskId> = tasks.iter().filter(|task| host(task) == own).collect();
        let rank = here.iter().position(|task| **task == self.task);
        (rank.unwrap_or(0), here.len().max(1))
    }

    /// Lines that tell the user what was understood, and from where; `duty` says what this task does.
    pub fn describe(&self, duty: &str) -> Vec<String> {
        let Self { spec, task, sources, .. } = self;
        let mut own = format!("task {task}, {duty}");
        own += &spec.address(task).map_or(String::new(), |address| format!(", at {address}"));
        let mut lines = vec![own];
        for job in spec.jobs() {
            let tasks = spec.tasks(job).map(|(task, address)| format!("{task} {address}"));
            lines.push(format!("cluster {}", tasks.collect::<Vec<_>>().join(", ")));
        }
        lines.push(format!("read {}", sources.join(", ")));
        lines
    }
}

type Layer = (String, ClusterSpec);

fn flag_layers(flags: &PlaceFlags) -> Result<Vec<Layer>, ClusterError> {
    let mut layers = Vec::new();
    let hosts = [("ps", &flags.ps_hosts), ("worker", &flags.worker_hosts)];
    for (job, list) in hosts {
        if let Some(list) = list.as_deref().filter(|list| !list.trim().is_empty()) {
            let spec = ClusterSpec::from_lists([(job, list.split(',').map(str::trim))])?;
            layers.push((format!("--{job}-hosts"), spec));
        }
    }
    Ok(layers)
}

/// All layers' jobs in one cluster, and which job came from where.
fn merged(layers: &[Layer]) -> Result<(ClusterSpec, Vec<String>), ClusterError> {
    let mut jobs = BTreeMap::<&str, (&str, Vec<(TaskId, &str)>)>::new();
    for (source, spec) in layers {
        for job in spec.jobs() {
            let tasks: Vec<_> = spec.tasks(job).collect();
            let Some((first, known)) = jobs.get(job) else {
                jobs.insert(job, (source, tasks));
                continue;
            };
            if *known != tasks {
                return Err(ClusterError::Contradiction {
                    first: (*first).to_owned(),
                    first_value: count_and_list(job, known),
                    second: source.clone(),
                    second_value: count_and_list(job, &tasks),
                });
            }
        }
    }
    let sources = jobs.iter().map(|(job, (source, _))| format!("{job} from {source}")).collect();
    let maps = jobs.into_iter().map(|(job, (_, tasks))| {
        (job, tasks.into_iter().map(|(task, address)| (task.index, address)))
    });
    Ok((ClusterSpec::from_maps(maps)?, sources))
}

fn count_and_list(job: &str, tasks: &[(TaskId, &str)]) -> String {
    let list: Vec<_> = tasks.iter().map(|(task, at)| format!("{} {at}", task.index)).collect();
    format!("{} {job} task(s) [{}]", tasks.len(), list.join(", "))
}

/// Adds what a launcher's rank says of the task.
fn with_rank(
    claim: Claim,
    found: &Found,
    spec: &ClusterSpec,
    sources: &str,
) -> Result<Claim, ClusterError> {
    let Some((rank, size)) = found.world else { return Ok(claim) };
    // Who stands outside the cluster is not one of its ranks.
    let outside =
        |job: &str| [EVALUATOR, CLIENT].contains(&job) && spec.tasks(job).next().is_none();
    if claim.job.as_deref().is_some_and(outside) {
        return Ok(claim);
    }
    let tasks: Vec<_> = spec.all().map(|(task, _)| task).collect();
    if tasks.len() != size as usize {
        return Err(ClusterError::Contradiction {
            first: sources.to_owned(),
            first_value: format!("{} task(s)", tasks.len()),
            second: found.source.to_owned(),
            second_value: format!("rank {rank} of {size}"),
        });
    }
    let named = claim.job.is_some() && claim.index.is_some();
    if named && tasks != spec.training_tasks() {
        return Ok(claim);
    }
    let Some(task) = tasks.get(rank as usize) else { return Ok(claim) };
    claim.joined(Claim::of(found.source, task))
}

#[cfg(test)]
mod tests {
    use super::*;

    const TF: &str = r#"{"cluster":{"ps":["p:1"],"worker":["w0:1","w1:1","w2:1"]},
        "task":{"type":"worker","index":0}}"#;

    fn flags(ps: &str, workers: &str, job: &str, task_index: Option<u32>) -> PlaceFlags {
        let some = |text: &str| Some(text.to_owned());
        PlaceFlags {
            ps_hosts: some(ps),
            worker_hosts: some(workers),
            job_name: some(job),
            task_index,
            client: false,
        }
    }

    fn resolve(
        flags: &PlaceFlags,
        file: Option<&str>,
        vars: &[(&str, &str)],
    ) -> Result<Option<Place>, String> {
        let spec: Option<ClusterSpec> = file.map(|text| text.parse().unwrap());
        let lookup = |name: &str| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let file = spec.as_ref().map(|spec| ("c.yaml", spec));
        Place::resolve(flags, file, &lookup).map_err(|error| error.to_string())
    }

    fn task(flags: &PlaceFlags, file: Option<&str>, vars: &[(&str, &str)]) -> String {
        resolve(flags, file, vars).unwrap().unwrap().task.to_string()
    }

    fn error(flags: &PlaceFlags, file: Option<&str>, vars: &[(&str, &str)]) -> String {
        resolve(flags, file, vars).unwrap_err()
    }

    #[test]
    fn the_seeds_command_line() {
        let place = resolve(&flags("a:1", "b:1, c:1", "worker", Some(1)), None, &[]);
        assert_eq!(
            place.unwrap().unwrap().describe("trains"),
            [
                "task worker:1, trains, at c:1",
                "cluster ps:0 a:1",
                "cluster worker:0 b:1, worker:1 c:1",
                "read ps from --ps-hosts, worker from --worker-hosts, \
                 worker:1 from --job-name/--task-index",
            ]
        );
    }

    #[test]
    fn each_layer_fills_what_the_stronger_leave_open() {
        let vars = [("TF_CONFIG", TF)];
        assert_eq!(task(&PlaceFlags::default(), None, &vars), "worker:0");
        assert_eq!(task(&flags("P:1", "", "worker", None), None, &vars), "worker:0");
        let file = r#"{"worker":["w0:1","w1:1"]}"#;
        let task_only = [("TF_CONFIG", r#"{"task":{"type":"worker","index":1}}"#)];
        assert_eq!(task(&flags("", "", "", None), Some(file), &task_only), "worker:1");
        let place = resolve(&flags("p:1", "", "ps", None), Some(file), &[]).unwrap().unwrap();
        assert_eq!(place.spec.to_string(), r#"{"ps":["p:1"],"worker":["w0:1","w1:1"]}"#);
        assert_eq!(place.describe("serves")[0], "task ps:0, serves, at p:1");
        let evaluator = resolve(&flags("", "", "evaluator", Some(9)), Some(file), &[]);
        assert_eq!(evaluator.unwrap().unwrap().describe("watches")[0], "task evaluator:9, watches");
        // One choice is no choice.
        let alone = resolve(&PlaceFlags::default(), Some(r#"{"worker":{"4":"a:1"}}"#), &[]);
        assert!(alone.unwrap().unwrap().sources[1].ends_with("worker:4 from there being no other"));
    }

    #[test]
    fn without_a_cluster_the_run_is_local() {
        for flags in [PlaceFlags::default(), flags("", "", "", Some(0))] {
            let one = [("RANK", "0"), ("WORLD_SIZE", "1")];
            let local = [("TF_CONFIG", r#"{"task":{"type":"worker","index":0}}"#)];
            for vars in [&[] as &[_], &one, &local] {
                assert_eq!(resolve(&flags, Some("{}"), vars), Ok(None));
            }
        }
        assert_eq!(
            error(&flags("", "", "worker", Some(0)), None, &[]),
            "--job-name/--task-index says worker:0, but there is no cluster: give --ps-hosts \
             and --worker-hosts, or `cluster` in the configuration file"
        );
        let ps = [("TF_CONFIG", r#"{"task":{"type":"ps","index":0}}"#)];
        assert!(error(&PlaceFlags::default(), None, &ps).starts_with("TF_CONFIG says ps:0, but"));
    }

    #[test]
    fn contradictions_name_both_sides() {
        let vars = [("TF_CONFIG", TF)];
        assert_eq!(
            error(&flags("", "w0:1,w1:1", "worker", Some(1)), None, &vars),
            "--job-name/--task-index says worker:1, but TF_CONFIG says worker:0: \
             correct or remove one"
        );
        assert_eq!(
            error(&flags("", "w0:1,w1:1", "", None), None, &vars),
            "--worker-hosts says 2 worker task(s) [0 w0:1, 1 w1:1], but TF_CONFIG says 3 worker \
             task(s) [0 w0:1, 1 w1:1, 2 w2:1]: correct or remove one"
        );
        assert_eq!(
            error(&flags("", "x:1", "", None), Some(r#"{"worker":["y:1"]}"#), &[]),
            "--worker-hosts says 1 worker task(s) [0 x:1], but `cluster` in c.yaml says 1 worker \
             task(s) [0 y:1]: correct or remove one"
        );
        assert!(
            error(&flags("", "", "", Some(2)), None, &vars)
                .starts_with("--task-index says task 2, but TF_CONFIG says worker:0")
        );
        assert!(
            error(&flags("", "", "ps", None), None, &vars)
                .starts_with("--job-name says job ps, but TF_CONFIG says worker:0")
        );
    }

    #[test]
    fn a_client_is_who_is_given_no_task() {
        let none = PlaceFlags { client: true, ..PlaceFlags::default() };
        let file = Some(r#"{"ps":["p:1"],"work":["w0:1"]}"#);
        let place = resolve(&none, file, &[]).unwrap().unwrap();
        assert_eq!(place.task.to_string(), "client:0");
        assert!(place.sources[2].ends_with("client:0 from no other being named"));
        assert_eq!(task(&none, Some(r#"{"chief":["c:1"],"worker":["w0:1"]}"#), &[]), "chief:0");
        let named = PlaceFlags { job_name: Some("work".to_owned()), ..none };
        assert_eq!(task(&named, file, &[]), "work:0");
    }

    #[test]
    fn ranks_are_tasks_in_order() {
        let slurm = |rank| [("SLURM_PROCID", rank), ("SLURM_NTASKS", "3")];
        let none = PlaceFlags::default();
        let with_ps = Some(r#"{"ps":["p:1"],"worker":["w0:1","w1:1"]}"#);
        assert_eq!(task(&none, with_ps, &slurm("0")), "ps:0");
        assert_eq!(task(&none, with_ps, &slurm("2")), "worker:1");
        // A script that starts the ps last.
        assert_eq!(task(&flags("", "", "ps", Some(0)), with_ps, &slurm("2")), "ps:0");
        let workers = Some(r#"{"worker":["w0:1","w1:1","w2:1"]}"#);
        assert_eq!(
            error(&flags("", "", "worker", Some(1)), workers, &slurm("2")),
            "--job-name/--task-index says worker:1, but Slurm says worker:2: \
             correct or remove one"
        );
        assert_eq!(
            error(&none, Some(r#"{"worker":["w0:1"]}"#), &slurm("2")),
            "worker from `cluster` in c.yaml says 1 task(s), but Slurm says rank 2 of 3: \
             correct or remove one"
        );
        assert_eq!(
            error(&none, None, &slurm("2")),
            "Slurm says rank 2 of 3, but not on which hosts: give every worker's address with \
             --worker-hosts or `cluster` in the configuration file"
        );
        let derived = [("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "h")];
        let place = resolve(&none, None, &derived).unwrap().unwrap();
        assert_eq!(place.spec.to_string(), r#"{"worker":["h:20000","h:20001"]}"#);
        assert_eq!(place.sources, ["worker from torchrun", "worker:1 from torchrun"]);
    }

    #[test]
    fn a_place_must_be_in_the_cluster() {
        let say = |job: &str, index| error(&flags("a:1", "b:1,c:1", job, index), None, &[]);
        assert_eq!(
            say("", None),
            "the cluster has the jobs ps, worker: Must specify an explicit job_name (--job-name)"
        );
        assert_eq!(
            say("worker", None),
            "job worker has the tasks 0, 1: Must specify an explicit task_index (--task-index)"
        );
        assert_eq!(
            say("work", Some(0)),
            "work is not a valid task_type in the cluster_spec (from --job-name/--task-index): it has ps, worker; did you mean worker?"
        );
        assert!(say("gpu", Some(0)).ends_with("it has ps, worker"));
        assert_eq!(
            say("worker", Some(u32::MAX)),
            "4294967295 is not a valid task_id for task_type worker (from --job-name/--task-index): it has 0, 1"
        );
        assert!(say("Worker", Some(0)).starts_with("job name 'Worker'"));
        assert_eq!(
            error(&flags("a:1", "", "ps", Some(0)), None, &[]),
            "job worker is empty: the cluster has ps tasks but no worker (--worker-hosts)"
        );
        assert!(
            error(&flags("a:1", "a:1", "ps", Some(0)), None, &[])
                .starts_with("ps:0 and worker:0 have the same address a:1")
        );
        let two = Some(r#"{"chief":["a:1"],"master":["b:1"]}"#);
        assert!(error(&PlaceFlags::default(), two, &[]).contains("only one \"chief\" node"));
        assert!(error(&flags("a:1,", "b:1", "", None), None, &[]).contains("ps:1: is empty"));
    }
}
