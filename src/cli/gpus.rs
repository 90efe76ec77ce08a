//! Which GPUs the towers of this process are on.

use anyhow::Result;

use super::output::note;
use crate::cluster::{Lookup, Place};
use crate::config::{Engine, Origin, Precision, Reduce, Resolved, RunConfig, TowerDevices};
use crate::device::DeviceError;
use crate::device::cuda;
use crate::session::Gpu;
use crate::train::{computing_tasks, towers_are_counted_elsewhere};

/// Puts the towers where they were asked for, beside those of other processes of this host. Where nobody asked they are on
/// the GPUs, if there are some.
///
/// # Errors
/// [`DeviceError::Absent`] for GPUs that are needed and cannot be had, unless `soft` allows the CPU in their place.
#[allow(clippy::disallowed_methods, reason = "the one place where a launcher's GPUs are looked up")]
pub(super) fn place_towers(
    resolved: &mut Resolved,
    soft: bool,
    place: Option<&Place>,
) -> Result<()> {
    let fellows = Fellows::of(&resolved.config, place, &|name| std::env::var(name).ok());
    match resolved.config.towers.devices {
        _ if resolved.leaves_towers_open() => take_all(resolved, &fellows),
        TowerDevices::Gpus(asked) => take_asked(resolved, &fellows, asked, soft),
        TowerDevices::Cpus(_) => Ok(()),
    }
}

/// All GPUs, or this process's part of them; the CPU where there are none.
fn take_all(resolved: &mut Resolved, fellows: &Fellows) -> Result<()> {
    let found = cuda::probe();
    let visible = found.gpus.as_ref().map_or(0, |gpus| gpus.len());
    let config = &resolved.config;
    let needs = [
        (config.reduce == Reduce::Nccl, "reduce: nccl"),
        (config.cluster.engine == Engine::Nccl, "cluster.engine: nccl"),
        (config.precision == Precision::Tf32, "precision: tf32"),
    ];
    if let Some((_, setting)) = needs.iter().find(|(is_so, _)| *is_so)
        && let Some(reason) = found.lack(&[])
    {
        return Err(absent(format!("{setting} needs GPUs"), reason));
    }
    if let Some(reason) = found.trouble() {
        note(&format!(
            "WARNING: the towers are on the CPU, since no GPU can be used: {reason}; --num-gpus makes this an error, --num-towers 1 takes the CPU without a word"
        ));
    }
    if visible == 0 || found.lack(&[]).is_some() {
        return Ok(());
    }
    let (first, count) = fellows.share(visible, None);
    resolved.config.towers.first_gpu = first as u32;
    Ok(resolved.place_towers(TowerDevices::Gpus(count), Origin::Default)?)
}

/// As many as were asked for.
fn take_asked(resolved: &mut Resolved, fellows: &Fellows, asked: usize, soft: bool) -> Result<()> {
    let found = cuda::probe();
    let visible = found.gpus.as_ref().map_or(0, |gpus| gpus.len());
    let (first, _) = fellows.share(visible, Some(asked));
    resolved.config.towers.first_gpu = first as u32;
    let Some(reason) = found.lack(&resolved.config.towers.gpus()) else { return Ok(()) };
    if !soft {
        let asked_for = format!("{asked} GPUs were asked for");
        let advice = format!("use --num-towers {asked} for CPU towers, or --allow-soft-placement");
        return Err(absent(asked_for, format!("{reason}; {advice}")));
    }
    note(&format!(
        "WARNING: --allow-soft-placement: {asked} GPU towers run on the CPU, since {reason}"
    ));
    let flag = Origin::Flag("--allow-soft-placement".to_owned());
    Ok(resolved.place_towers(TowerDevices::Cpus(asked), flag)?)
}

/// The GPUs of a task that answers TensorFlow's clients: those that were asked for, or all, also where other tasks of this host have them,
/// too. They are opened when a graph computes on them.
///
/// # Errors
/// As for [`place_towers`].
pub(super) fn for_sessions(resolved: &Resolved, soft: bool) -> Result<Vec<Gpu>> {
    let towers = &resolved.config.towers;
    let asked = match towers.devices {
        _ if resolved.leaves_towers_open() => return Ok(all_for_sessions()),
        TowerDevices::Cpus(_) => return Ok(Vec::new()),
        TowerDevices::Gpus(asked) => asked,
    };
    let found = cuda::probe();
    let Some(reason) = found.lack(&towers.gpus()) else { return Ok(cards(&found, &towers.gpus())) };
    if !soft {
        let advice = "leave the flag out, or use --allow-soft-placement";
        return Err(absent(format!("{asked} GPUs were asked for"), format!("{reason}; {advice}")));
    }
    note(&format!("WARNING: --allow-soft-placement: graphs run on the CPU, since {reason}"));
    Ok(Vec::new())
}

/// All GPUs that can be used, for sessions.
pub(super) fn all_for_sessions() -> Vec<Gpu> {
    let found = cuda::probe();
    if let Some(reason) = found.trouble() {
        note(&format!("WARNING: graphs run on the CPU, since no GPU can be used: {reason}"));
        return Vec::new();
    }
    let count = found.gpus.as_ref().map_or(0, |gpus| gpus.len() as u32);
    cards(&found, &(0..count).collect::<Vec<_>>())
}

fn cards(found: &cuda::Probe, ordinals: &[u32]) -> Vec<Gpu> {
    let found = found.gpus.as_deref().unwrap_or_default();
    let gpu = |(number, &ordinal): (usize, &u32)| {
        found.get(ordinal as usize).map(|card| Gpu::cuda(number, ordinal, card))
    };
    ordinals.iter().enumerate().filter_map(gpu).collect()
}

fn absent(asked: String, reason: String) -> anyhow::Error {
    DeviceError::Absent { asked, reason }.into()
}

/// The processes of this host that compute.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Fellows {
    /// This one's number among them.
    rank: usize,
    /// How many there are, as far as is known.
    size: usize,
    /// Whether each of them sees GPUs of its own only.
    masked: bool,
    /// Whether tasks that do not see these GPUs have to know how many towers there are.
    counted: bool,
}

impl Fellows {
    /// By the addresses of a cluster; where these show nobody else, by the launcher's number.
    fn of(config: &RunConfig, place: Option<&Place>, env: Lookup<'_>) -> Self {
        let given = |name| env(name).is_some_and(|value| !["", "none"].contains(&value.trim()));
        let masked = given("SLURM_GPUS_PER_TASK") || given("SLURM_GPU_BIND");
        let Some(place) = place else { return Self { rank: 0, size: 1, masked, counted: false } };
        let (rank, size) = match place.on_host(&computing_tasks(config, &place.spec)) {
            (_, 1) => {
                let rank = place.local_rank.map_or(0, |rank| rank as usize);
                (rank, rank + 1)
            }
            known => known,
        };
        let counted = towers_are_counted_elsewhere(config);
        Self { rank, size, masked, counted }
    }

    /// The first GPU of this process, and how many are its own, of those that are visible.
    fn share(self, visible: usize, asked: Option<usize>) -> (usize, usize) {
        let each = match asked {
            Some(asked) => asked,
            None if self.counted => 1,
            None if self.masked => visible,
            None => visible / self.size,
        };
        // Too few for all: either each sees its own, or they are shared.
        let enough = !self.masked && each > 0 && each.saturating_mul(self.size) <= visible;
        match (enough, each) {
            (true, each) => (self.rank * each, each),
            (false, 0) => (0, visible),
            (false, each) => (0, each),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(mode: &str) -> RunConfig {
        let mut config = RunConfig::recipe("cifar10").unwrap();
        config.cluster.mode = serde_json::from_value(mode.into()).unwrap();
        config
    }

    /// The place of a task among these workers and one parameter server, all of one host unless it says otherwise.
    fn fellows(mode: &str, workers: &str, task: &str, env: &[(&str, &str)]) -> Fellows {
        let spec = format!(r#"{{"ps":["a:1"],"worker":[{workers}]}}"#).parse().unwrap();
        let lookup = |name: &str| {
            env.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        let local_rank = lookup("SLURM_LOCALID").map(|rank| rank.parse().unwrap());
        let task = task.parse().unwrap();
        let place = Place { spec, task, sources: Vec::new(), local_rank };
        Fellows::of(&config(mode), Some(&place), &lookup)
    }

    #[test]
    fn workers_of_a_host_have_gpus_of_their_own() {
        let workers = r#""a:2","a:3","b:2""#;
        let share =
            |task, visible, asked| fellows("collective", workers, task, &[]).share(visible, asked);
        assert_eq!([share("worker:0", 4, None), share("worker:1", 4, None)], [(0, 2), (2, 2)]);
        assert_eq!(share("worker:1", 5, None), (2, 2), "all have as many");
        assert_eq!(share("worker:2", 4, None), (0, 4), "alone on its host");
        assert_eq!(share("worker:1", 4, Some(1)), (1, 1));
        // Not enough for both: either a mask of its own each, or they share.
        assert_eq!([share("worker:1", 2, Some(2)), share("worker:1", 1, None)], [(0, 2), (0, 1)]);
        assert_eq!(share("worker:1", 1, Some(2)), (0, 2), "refused later");
    }

    #[test]
    fn a_launchers_word_counts_where_addresses_do_not_tell() {
        let apart = r#""a:2","b:2","c:2""#;
        let share = |env: &[(&str, &str)], visible, asked| {
            fellows("collective", apart, "worker:2", env).share(visible, asked)
        };
        assert_eq!(share(&[("SLURM_LOCALID", "2")], 4, Some(1)), (2, 1));
        let masked = [("SLURM_LOCALID", "1"), ("SLURM_GPUS_PER_TASK", "2")];
        assert_eq!([share(&masked, 2, Some(1)), share(&masked, 2, None)], [(0, 1), (0, 2)]);
        assert_eq!(
            share(&[("SLURM_LOCALID", "1"), ("SLURM_GPU_BIND", "none")], 2, Some(1)),
            (1, 1)
        );
    }

    #[test]
    fn where_others_count_towers_there_is_one() {
        let share = |task| fellows("ps-sync", r#""a:2","a:3""#, task, &[]).share(8, None);
        assert_eq!([share("worker:0"), share("worker:1")], [(0, 1), (1, 1)]);
    }
}
