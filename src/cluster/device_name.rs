//! [`DeviceName`]: TensorFlow's device strings, `/job:worker/replica:0/task:1/device:GPU:0`.

use std::fmt;
use std::str::FromStr;

/// The two kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceKind {
    /// The processor; one device however many cores, unless split into towers.
    Cpu,
    /// A CUDA device.
    Gpu,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            DeviceKind::Cpu => "CPU",
            DeviceKind::Gpu => "GPU",
        })
    }
}

/// A device name, possibly partial; fields left out mean "any".
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct DeviceName {
    /// `worker`, `ps`, `localhost`.
    pub job: Option<String>,
    /// Always 0 in practice.
    pub replica: Option<u32>,
    /// Index within the job.
    pub task: Option<u32>,
    /// CPU or GPU.
    pub kind: Option<DeviceKind>,
    /// Index among the task's devices of this kind.
    pub ordinal: Option<u32>,
}

impl DeviceName {
    /// The full name of a device of a program that is in no cluster.
    pub fn local(kind: DeviceKind, ordinal: u32) -> Self {
        Self {
            job: Some("localhost".to_owned()),
            replica: Some(0),
            task: Some(0),
            kind: Some(kind),
            ordinal: Some(ordinal),
        }
    }

    /// The inner scope's fields win over the outer's, as nested device scopes do.
    pub fn merged(&self, inner: &Self) -> Self {
        Self {
            job: inner.job.clone().or_else(|| self.job.clone()),
            replica: inner.replica.or(self.replica),
            task: inner.task.or(self.task),
            kind: inner.kind.or(self.kind),
            ordinal: inner.ordinal.or(self.ordinal),
        }
    }

    /// True if a fully named device satisfies this request.
    pub fn accepts(&self, full: &Self) -> bool {
        fn fits<T: PartialEq>(wanted: &Option<T>, given: &Option<T>) -> bool {
            wanted.is_none() || wanted == given
        }
        fits(&self.job, &full.job)
            && fits(&self.replica, &full.replica)
            && fits(&self.task, &full.task)
            && fits(&self.kind, &full.kind)
            && fits(&self.ordinal, &full.ordinal)
    }
}

/// Why a text is no device name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceNameError {
    /// A part that no device name has.
    #[error("unknown attribute: '{part}' in '{name}'")]
    UnknownAttribute {
        /// The part.
        part: String,
        /// The whole text.
        name: String,
    },
    /// A part that is there twice.
    #[error("cannot specify '{part}' twice: '{name}'")]
    Twice {
        /// The part.
        part: String,
        /// The whole text.
        name: String,
    },
}

impl FromStr for DeviceName {
    type Err = DeviceNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let mut out = Self::default();
        for part in name.split('/').filter(|part| !part.is_empty()) {
            let unknown =
                || DeviceNameError::UnknownAttribute { part: part.into(), name: name.into() };
            let twice = || DeviceNameError::Twice { part: part.into(), name: name.into() };
            let number = |text: &str| text.parse::<u32>().map_err(|_| unknown());
            let lower = part.to_ascii_lowercase();
            let fields: Vec<&str> = lower.split(':').collect();
            let kind = |text: &str| match text {
                "cpu" => Ok(DeviceKind::Cpu),
                "gpu" => Ok(DeviceKind::Gpu),
                _ => Err(unknown()),
            };
            let once = |taken: bool| if taken { Err(twice()) } else { Ok(()) };
            match fields[..] {
                ["job", job] if !job.is_empty() => {
                    once(out.job.is_some())?;
                    // Job names keep their case.
                    out.job = Some(part[4..].to_owned());
                }
                ["replica", n] => {
                    once(out.replica.is_some())?;
                    out.replica = Some(number(n)?);
                }
                ["task", n] => {
                    once(out.task.is_some())?;
                    out.task = Some(number(n)?);
                }
                ["device", k]
                | ["device", k, "*"]
                | [k @ ("cpu" | "gpu")]
                | [k @ ("cpu" | "gpu"), "*"] => {
                    once(out.kind.is_some())?;
                    out.kind = Some(kind(k)?);
                }
                ["device", k, n] | [k @ ("cpu" | "gpu"), n] => {
                    once(out.kind.is_some())?;
                    (out.kind, out.ordinal) = (Some(kind(k)?), Some(number(n)?));
                }
                _ => return Err(unknown()),
            }
        }
        Ok(out)
    }
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(job) = &self.job {
            write!(f, "/job:{job}")?;
        }
        if let Some(replica) = self.replica {
            write!(f, "/replica:{replica}")?;
        }
        if let Some(task) = self.task {
            write!(f, "/task:{task}")?;
        }
        match (self.kind, self.ordinal) {
            (Some(kind), Some(ordinal)) => write!(f, "/device:{kind}:{ordinal}"),
            (Some(kind), None) => write!(f, "/device:{kind}:*"),
            (None, _) => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(text: &str) -> DeviceName {
        text.parse().unwrap()
    }

    #[test]
    fn reads_what_tensorflow_users_write() {
        let full = name("/job:worker/replica:0/task:1/device:GPU:0");
        assert_eq!(full.to_string(), "/job:worker/replica:0/task:1/device:GPU:0");
        assert_eq!(name("/gpu:0").to_string(), "/device:GPU:0");
        assert_eq!(name("/CPU").to_string(), "/device:CPU:*");
        assert_eq!(name("/device:gpu:*").to_string(), "/device:GPU:*");
        assert_eq!(name("/task:1/job:ps").to_string(), "/job:ps/task:1");
        assert_eq!(name(""), DeviceName::default());
        assert!(name("/job:worker/gpu:0").accepts(&full) && !name("/gpu:1").accepts(&full));
        assert_eq!(
            name("/job:ps/cpu:0").merged(&name("/task:2/gpu:1")),
            name("/job:ps/task:2/gpu:1")
        );
    }

    #[test]
    fn refuses_the_rest() {
        let error = "/job:ps/tpu:0".parse::<DeviceName>().unwrap_err();
        assert_eq!(error.to_string(), "unknown attribute: 'tpu:0' in '/job:ps/tpu:0'");
        for bad in
            ["/cpu:0/gpu:0", "/job:a/job:b", "/task:x", "/device:", "/job:", "/cpu:0:1", "/task:-1"]
        {
            assert!(bad.parse::<DeviceName>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn parse_undoes_print(
            job in prop::option::of("[a-zA-Z][a-z0-9_]{0,8}"),
            replica in prop::option::of(0u32..9),
            task in prop::option::of(any::<u32>()),
            gpu in prop::option::of((any::<bool>(), prop::option::of(any::<u32>()))),
        ) {
            let kind = gpu.map(|(gpu, _)| if gpu { DeviceKind::Gpu } else { DeviceKind::Cpu });
            let ordinal = gpu.and_then(|(_, ordinal)| ordinal);
            let device = DeviceName { job, replica, task, kind, ordinal };
            prop_assert_eq!(device.to_string().parse::<DeviceName>().unwrap(), device);
        }
    }
}
