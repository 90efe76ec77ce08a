//! The towers' settings.

use serde::{Deserialize, Serialize};

/// The devices that compute gradients side by side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Fields", into = "Fields")]
pub struct TowersConfig {
    /// Kind and number.
    pub devices: TowerDevices,
    /// Which GPUs, by their numbers among the visible ones, a tower on each in this order, also several; `None` = the first ones.
    pub gpu_indices: Option<Vec<u32>>,
    /// The number of the first of them where no indices are given. No setting: other processes of the host have those before.
    pub first_gpu: u32,
    /// Micro-batches each tower averages per step, at least 1.
    pub accumulate: usize,
    /// CPU threads of all towers together; `None` = all cores.
    pub threads: Option<usize>,
    /// Whether each tower applies its gradients without waiting for the others.
    pub asynchronous: bool,
}

/// Kind and number of towers; `gpus` or `cpus` in YAML.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TowerDevices {
    /// So many GPUs, one tower each.
    Gpus(usize),
    /// So many towers on the CPU.
    Cpus(usize),
}

impl TowersConfig {
    /// The GPUs of the towers, by their numbers among the visible ones; none for CPU towers.
    pub fn gpus(&self) -> Vec<u32> {
        match (&self.devices, &self.gpu_indices) {
            (TowerDevices::Cpus(_), _) => Vec::new(),
            (TowerDevices::Gpus(_), Some(indices)) => indices.clone(),
            (TowerDevices::Gpus(count), None) => (self.first_gpu..).take(*count).collect(),
        }
    }

    /// The number of towers, at least 1.
    pub fn count(&self) -> usize {
        match self.devices {
            TowerDevices::Gpus(count) | TowerDevices::Cpus(count) => count,
        }
    }
}

impl Default for TowersConfig {
    fn default() -> Self {
        Self {
            devices: TowerDevices::Cpus(1),
            gpu_indices: None,
            first_gpu: 0,
            accumulate: 1,
            threads: None,
            asynchronous: false,
        }
    }
}

/// The YAML layout.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gpus: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    cpus: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gpu_indices: Option<Vec<u32>>,
    #[serde(default = "default_accumulate")]
    accumulate: usize,
    #[serde(default)]
    threads: Option<usize>,
    #[serde(default)]
    asynchronous: bool,
}

fn default_accumulate() -> usize {
    TowersConfig::default().accumulate
}

impl TryFrom<Fields> for TowersConfig {
    type Error = &'static str;

    fn try_from(fields: Fields) -> Result<Self, Self::Error> {
        let devices = match (fields.gpus, fields.cpus) {
            (Some(count), None) => TowerDevices::Gpus(count),
            (None, Some(count)) => TowerDevices::Cpus(count),
            (None, None) => Self::default().devices,
            (Some(_), Some(_)) => return Err("towers are either gpus or cpus"),
        };
        let Fields { gpu_indices, accumulate, threads, asynchronous, .. } = fields;
        Ok(Self { devices, gpu_indices, first_gpu: 0, accumulate, threads, asynchronous })
    }
}

impl From<TowersConfig> for Fields {
    fn from(config: TowersConfig) -> Self {
        let (gpus, cpus) = match config.devices {
            TowerDevices::Gpus(count) => (Some(count), None),
            TowerDevices::Cpus(count) => (None, Some(count)),
        };
        let TowersConfig { gpu_indices, accumulate, threads, asynchronous, .. } = config;
        Self { gpus, cpus, gpu_indices, accumulate, threads, asynchronous }
    }
}
