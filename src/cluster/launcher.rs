//! Places given by launchers: torchrun, Open MPI, Slurm.
//!
//! A launcher tells each process its rank and the number of ranks. Where it also tells the hosts,
//! rank r is `worker:r` at *the host of r*, port *base + r*. The base is `MASTER_PORT` (plus one
//! where torchrun's agent listens there itself), else 20000 + 64 (job id mod 199), the job id being
//! `SLURM_JOB_ID`, else Open MPI's, else 0: jobs that share a host mostly have ids in a row, and get
//! 64 ports each. Slurm's ranks fill its node list in blocks, its default. torchrun and Open MPI
//! name one host at most, so only a job on one host is derived.

use crate::cluster::task_id::parse_index;
use crate::cluster::{
    ClusterError, ClusterSpec, Found, Lookup, TaskId, address, expand_nodelist, nodelist,
};

/// Derived ports stay below 32768, from where systems take those of outgoing connections.
const FIRST_PORT: u32 = 20_000;
const PORTS_OF_A_JOB: u32 = 64;
/// A prime, as Open MPI's ids are multiples of 65536, plus one.
const JOBS: u32 = 199;

/// torchrun's `RANK` and `WORLD_SIZE`, if set.
pub(crate) fn torchrun(env: Lookup<'_>) -> Result<Option<Found>, ClusterError> {
    let Some(world) = world(env, "RANK", "WORLD_SIZE")? else { return Ok(None) };
    let local_rank = number(env, "LOCAL_RANK")?;
    let one = on_one_host(world, local_rank, number(env, "LOCAL_WORLD_SIZE")?);
    let hosts = |size| Ok(env("MASTER_ADDR").filter(|_| one).map(|host| vec![host; size]));
    launched("torchrun", env, world, local_rank, &hosts).map(Some)
}

/// Open MPI's `OMPI_COMM_WORLD_*`, if set.
pub(crate) fn open_mpi(env: Lookup<'_>) -> Result<Option<Found>, ClusterError> {
    let world = world(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")?;
    let Some(world) = world else { return Ok(None) };
    let local_rank = number(env, "OMPI_COMM_WORLD_LOCAL_RANK")?;
    let one = on_one_host(world, local_rank, number(env, "OMPI_COMM_WORLD_LOCAL_SIZE")?);
    let host = env("MASTER_ADDR").unwrap_or_else(|| "127.0.0.1".to_owned());
    let hosts = |size| Ok(one.then(|| vec![host.clone(); size]));
    launched("Open MPI", env, world, local_rank, &hosts).map(Some)
}

/// Slurm's `SLURM_*`, if set.
pub(crate) fn slurm(env: Lookup<'_>) -> Result<Option<Found>, ClusterError> {
    // A batch script without a number of tasks has a SLURM_PROCID too.
    if env("SLURM_NTASKS").is_none() {
        return Ok(None);
    }
    let Some(world) = world(env, "SLURM_PROCID", "SLURM_NTASKS")? else { return Ok(None) };
    let hosts = |size| slurm_hosts(env, size);
    launched("Slurm", env, world, number(env, "SLURM_LOCALID")?, &hosts).map(Some)
}

/// The host of every rank. The step's list wins over the job's, which may name more nodes.
fn slurm_hosts(env: Lookup<'_>, size: usize) -> Result<Option<Vec<String>>, ClusterError> {
    let either = |names: [&'static str; 2]| {
        names.into_iter().find_map(|name| env(name).map(|value| (name, value)))
    };
    let nodes = either(["SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"]);
    let Some((name, value)) = nodes else { return Ok(None) };
    let nodes = expand_nodelist(&value).map_err(|why| variable(name, &value, why))?;
    let counts = match either(["SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"]) {
        // Even blocks, the first nodes taking what is over.
        None => {
            let (each, over) = (size / nodes.len(), size % nodes.len());
            (0..nodes.len()).map(|node| each + usize::from(node < over)).collect()
        }
        Some((name, value)) => {
            let counts = nodelist::expand_counts(&value).unwrap_or_default();
            let counts: Vec<_> = counts.into_iter().map(|count| count as usize).collect();
            if counts.len() != nodes.len() || counts.iter().sum::<usize>() != size {
                let why = format!("does not place {size} tasks on {} nodes", nodes.len());
                return Err(variable(name, &value, why));
            }
            counts
        }
    };
    let blocks = nodes.into_iter().zip(counts);
    Ok(Some(blocks.flat_map(|(host, count)| std::iter::repeat_n(host, count)).collect()))
}

/// Turns a rank into a task; `hosts` gives the host of each of so many ranks, if known.
fn launched(
    source: &'static str,
    env: Lookup<'_>,
    world: (u32, u32),
    local_rank: Option<u32>,
    hosts: &dyn Fn(usize) -> Result<Option<Vec<String>>, ClusterError>,
) -> Result<Found, ClusterError> {
    let (rank, size) = world;
    let mut found = Found { source, spec: None, task: None, world: Some(world), local_rank };
    // One rank is no cluster.
    if size == 1 {
        return Ok(found);
    }
    found.task = Some(TaskId::new("worker", rank));
    // Beyond the number of ports there is nothing to derive, nor memory to be had.
    let hosts = if size <= 65_535 { hosts(size as usize)? } else { None };
    if let Some(hosts) = hosts {
        let base = base_port(env)?;
        if base + (size - 1) > 65_535 {
            return Err(ClusterError::NoPorts { base, size });
        }
        let addresses = (base..).zip(&hosts).map(|(port, host)| address::join(host, port));
        found.spec = Some(ClusterSpec::from_lists([("worker", addresses)])?);
    }
    Ok(found)
}

fn base_port(env: Lookup<'_>) -> Result<u32, ClusterError> {
    if let Some(port) = number(env, "MASTER_PORT")? {
        if !(1..=65_535).contains(&port) {
            let why = "is not a port from 1 to 65535".to_owned();
            return Err(variable("MASTER_PORT", &port.to_string(), why));
        }
        let taken = env("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|value| value == "True");
        return Ok(port + u32::from(taken));
    }
    let job = match number(env, "SLURM_JOB_ID")? {
        None => number(env, "OMPI_MCA_ess_base_jobid")?,
        job => job,
    };
    Ok(FIRST_PORT + PORTS_OF_A_JOB * (job.unwrap_or(0) % JOBS))
}

/// On one host ranks and local ranks are the same.
fn on_one_host((rank, size): (u32, u32), local: Option<u32>, local_size: Option<u32>) -> bool {
    local.unwrap_or(rank) == rank && local_size.unwrap_or(size) == size
}

/// Rank and size, if the rank is set.
fn world(
    env: Lookup<'_>,
    rank_name: &'static str,
    size_name: &'static str,
) -> Result<Option<(u32, u32)>, ClusterError> {
    let Some(rank) = number(env, rank_name)? else { return Ok(None) };
    let unset = ClusterError::Unset { set: rank_name, unset: size_name };
    let size = number(env, size_name)?.ok_or(unset)?;
    if rank >= size {
        let why = format!("must be below {size_name}={size}");
        return Err(variable(rank_name, &rank.to_string(), why));
    }
    Ok(Some((rank, size)))
}

fn number(env: Lookup<'_>, name: &str) -> Result<Option<u32>, ClusterError> {
    let Some(value) = env(name) else { return Ok(None) };
    let number = parse_index(value.trim());
    let why = || format!("is not a whole number from 0 to {}", u32::MAX);
    number.map(Some).ok_or_else(|| variable(name, &value, why()))
}

fn variable(name: &str, value: &str, why: String) -> ClusterError {
    ClusterError::Variable { name: name.to_owned(), value: value.to_owned(), why }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::find;

    fn read(vars: &[(&str, &str)]) -> Result<Vec<Found>, String> {
        let lookup = |name: &str| {
            vars.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        find(&lookup).map_err(|error| error.to_string())
    }

    fn one(vars: &[(&str, &str)]) -> Found {
        let mut found = read(vars).unwrap();
        assert_eq!(found.len(), 1);
        found.remove(0)
    }

    /// Task and addresses.
    fn place(found: &Found) -> String {
        let text = |x: Option<String>| x.unwrap_or_else(|| "-".to_owned());
        let task = text(found.task.as_ref().map(ToString::to_string));
        format!("{task} {}", text(found.spec.as_ref().map(ToString::to_string)))
    }

    #[test]
    fn reads_torchrun() {
        let mut vars = vec![
            ("RANK", "1"),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", "1"),
            ("MASTER_ADDR", "::1"),
            ("MASTER_PORT", "29500"),
        ];
        let found = one(&vars);
        assert_eq!(place(&found), r#"worker:1 {"worker":["[::1]:29500","[::1]:29501"]}"#);
        assert_eq!((found.source, found.world), ("torchrun", Some((1, 2))));
        assert_eq!(found.local_rank, Some(1));
        vars.push(("TORCHELASTIC_USE_AGENT_STORE", "True"));
        assert_eq!(place(&one(&vars)), r#"worker:1 {"worker":["[::1]:29501","[::1]:29502"]}"#);
        // Two hosts of one rank each: the other's name is not known.
        vars[2].1 = "0";
        assert_eq!(place(&one(&vars)), "worker:1 -");
        assert_eq!(place(&one(&[("RANK", "0"), ("WORLD_SIZE", "1")])), "- -");
        let huge = [("RANK", "0"), ("WORLD_SIZE", "4294967295"), ("MASTER_ADDR", "a")];
        assert_eq!(place(&one(&huge)), "worker:0 -");
    }

    #[test]
    fn reads_slurm_and_open_mpi() {
        let mut vars = vec![
            ("SLURM_PROCID", "4"),
            ("SLURM_NTASKS", "5"),
            ("SLURM_JOB_NODELIST", "n[1-2],m"),
            ("SLURM_JOB_ID", "40007"),
        ];
        let even = r#"["n1:20512","n1:20513","n2:20514","n2:20515","m:20516"]"#;
        assert_eq!(place(&one(&vars)), format!(r#"worker:4 {{"worker":{even}}}"#));
        vars.push(("SLURM_TASKS_PER_NODE", "1(x2),3"));
        let told = r#"["n1:20512","n2:20513","m:20514","m:20515","m:20516"]"#;
        assert_eq!(place(&one(&vars)), format!(r#"worker:4 {{"worker":{told}}}"#));
        vars[4].1 = "1(x2)";
        assert_eq!(
            read(&vars).unwrap_err(),
            "SLURM_TASKS_PER_NODE='1(x2)': does not place 5 tasks on 3 nodes"
        );
        assert_eq!(read(&[("SLURM_PROCID", "0")]), Ok(Vec::new()), "a batch script");

        // Started by Slurm, yet the inner launcher's rank counts.
        vars.extend([("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "2")]);
        let found = one(&vars);
        assert_eq!(place(&found), r#"worker:0 {"worker":["127.0.0.1:20512","127.0.0.1:20513"]}"#);
        assert_eq!(found.source, "Open MPI");
        vars.push(("OMPI_COMM_WORLD_LOCAL_SIZE", "1"));
        assert_eq!(place(&one(&vars)), "worker:0 -");
    }

    #[test]
    fn jobs_in_a_row_share_no_port() {
        let ports = |job: u32| {
            let job = job.to_string();
            let vars = [
                ("SLURM_PROCID", "0"),
                ("SLURM_NTASKS", "64"),
                ("SLURM_JOB_NODELIST", "n"),
                ("SLURM_JOB_ID", &job),
            ];
            let spec = one(&vars).spec.unwrap();
            spec.all().map(|(_, address)| address.to_owned()).collect::<Vec<_>>()
        };
        let mut all: Vec<_> = (4000..4199).flat_map(ports).collect();
        assert!(all.iter().all(|address| ("n:20000".."n:32768").contains(&address.as_str())));
        all.sort();
        all.dedup();
        assert_eq!(all.len(), 199 * 64);
    }

    #[test]
    fn refuses_hostile_variables() {
        let base = [("MASTER_ADDR", "a"), ("WORLD_SIZE", "2")];
        for (extra, why) in [
            ([("RANK", "2"), ("", "")], "RANK='2': must be below WORLD_SIZE=2"),
            ([("RANK", "-1"), ("", "")], "RANK='-1': is not a whole number from 0 to 4294967295"),
            (
                [("RANK", "1"), ("MASTER_PORT", "65535")],
                "2 ranks need a port each from 65535 on, which is too high: set a lower MASTER_PORT",
            ),
            (
                [("RANK", "1"), ("MASTER_PORT", "0")],
                "MASTER_PORT='0': is not a port from 1 to 65535",
            ),
            (
                [("RANK", "1"), ("LOCAL_RANK", "x")],
                "LOCAL_RANK='x': is not a whole number from 0 to 4294967295",
            ),
        ] {
            let vars: Vec<_> = base.into_iter().chain(extra).collect();
            assert_eq!(read(&vars).unwrap_err(), why);
        }
        assert_eq!(
            read(&[("RANK", "0")]).unwrap_err(),
            "RANK is set but WORLD_SIZE is not: set both or neither"
        );
        let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "2"), ("SLURM_JOB_NODELIST", "n[1")];
        assert_eq!(read(&slurm).unwrap_err(), "SLURM_JOB_NODELIST='n[1': has no ']' in 'n[1'");
    }
}
