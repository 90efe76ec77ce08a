//! [`ClusterSpec`]: the address of every task of a cluster.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use serde::de::{Deserialize, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde::ser::{Serialize, SerializeMap, Serializer};

use crate::cluster::task_id::{check_job, parse_index};
use crate::cluster::{ClusterError, TaskId, address};

/// The jobs of a cluster and the address of every task, as `ps -> {0: "a:2222"}`.
///
/// Every address is `host:port` and occurs once. Reads and prints as `TF_CONFIG` and the
/// configuration file write it: `{"ps":["a:1","b:2"],"worker":{"3":"c:1"}}`, a list where the
/// indices are 0, 1, 2... and a map where some are missing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClusterSpec {
    jobs: BTreeMap<String, BTreeMap<u32, String>>,
}

impl ClusterSpec {
    /// Tasks 0, 1, 2... of each job, as `[("ps", ["a:1", "b:2"])]`.
    pub fn from_lists<J, L, A>(jobs: impl IntoIterator<Item = (J, L)>) -> Result<Self, ClusterError>
    where
        J: Into<String>,
        L: IntoIterator<Item = A>,
        A: AsRef<str>,
    {
        Self::from_maps(jobs.into_iter().map(|(job, list)| (job, (0..).zip(list))))
    }

    /// Tasks with explicit indices, gaps allowed, as `[("worker", [(1, "c:1")])]`.
    pub fn from_maps<J, M, A>(jobs: impl IntoIterator<Item = (J, M)>) -> Result<Self, ClusterError>
    where
        J: Into<String>,
        M: IntoIterator<Item = (u32, A)>,
        A: AsRef<str>,
    {
        let mut spec = Self::default();
        for (job, tasks) in jobs {
            let job = job.into();
            check_job(&job)?;
            if spec.jobs.contains_key(&job) {
                return Err(ClusterError::DuplicateJob(job));
            }
            let mut addresses = BTreeMap::new();
            for (index, address) in tasks {
                let task = TaskId::new(&job, index);
                let address = address.as_ref();
                let canonical = address::canonical(address).map_err(|why| {
                    ClusterError::Address { task: task.clone(), address: address.into(), why }
                })?;
                if addresses.insert(index, canonical).is_some() {
                    return Err(ClusterError::DuplicateTask(task));
                }
            }
            if addresses.is_empty() {
                return Err(ClusterError::EmptyJob(job));
            }
            spec.jobs.insert(job, addresses);
        }
        spec.check_distinct()?;
        Ok(spec)
    }

    /// For tests: so many tasks of each job, all at `127.0.0.1:0`. The only way to port 0; what the
    /// system chose goes into a second spec.
    pub fn loopback(jobs: &[(&str, u32)]) -> Self {
        let tasks = |n| (0..n).map(|index| (index, "127.0.0.1:0".to_owned())).collect();
        Self { jobs: jobs.iter().map(|&(job, n)| (job.to_owned(), tasks(n))).collect() }
    }

    /// The seeds' readers paste the ps list into `--worker-hosts`.
    fn check_distinct(&self) -> Result<(), ClusterError> {
        let mut seen = BTreeMap::new();
        for (second, address) in self.all() {
            if let Some(first) = seen.insert(address, second.clone()) {
                let address = address.to_owned();
                return Err(ClusterError::DuplicateAddress { first, second, address });
            }
        }
        Ok(())
    }

    /// Job names, in order.
    pub fn jobs(&self) -> impl Iterator<Item = &str> {
        self.jobs.keys().map(String::as_str)
    }

    /// The tasks of one job by index, with their addresses; none for an unknown job.
    pub fn tasks(&self, job: &str) -> impl Iterator<Item = (TaskId, &str)> {
        self.jobs.get_key_value(job).into_iter().flat_map(|(job, tasks)| {
            tasks.iter().map(move |(&index, address)| (TaskId::new(job, index), address.as_str()))
        })
    }

    /// Every task in order, with its address.
    pub fn all(&self) -> impl Iterator<Item = (TaskId, &str)> {
        self.jobs().flat_map(|job| self.tasks(job))
    }

    /// Where a task is; nothing for an unknown one.
    pub fn address(&self, task: &TaskId) -> Option<&str> {
        self.jobs.get(&task.job)?.get(&task.index).map(String::as_str)
    }

    /// True without any task: not a cluster.
    pub fn is_empty(&self) -> bool {
        self.jobs.is_empty()
    }
}

impl fmt::Display for ClusterSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(self).map_err(|_| fmt::Error)?)
    }
}

impl FromStr for ClusterSpec {
    type Err = ClusterError;

    fn from_str(text: &str) -> Result<Self, ClusterError> {
        serde_json::from_str(text).map_err(|error| ClusterError::Spec(error.to_string()))
    }
}

impl Serialize for ClusterSpec {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.jobs.len()))?;
        for (job, tasks) in &self.jobs {
            if tasks.keys().copied().eq(0..tasks.len() as u32) {
                map.serialize_entry(job, &tasks.values().collect::<Vec<_>>())?;
            } else {
                map.serialize_entry(job, tasks)?;
            }
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for ClusterSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Jobs;
        impl<'de> Visitor<'de> for Jobs {
            type Value = ClusterSpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map from job to addresses")
            }

            // By hand, as a derived map would let the second of two equal keys win.
            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<ClusterSpec, M::Error> {
                let mut jobs = Vec::new();
                while let Some(job) = map.next_key::<String>()? {
                    let tasks = map.next_value::<Tasks>();
                    let tasks =
                        tasks.map_err(|error| M::Error::custom(format!("job {job}: {error}")))?;
                    jobs.push((job, tasks.0));
                }
                ClusterSpec::from_maps(jobs).map_err(M::Error::custom)
            }
        }
        deserializer.deserialize_map(Jobs)
    }
}

/// One job: a list of addresses, or a map from index to address.
struct Tasks(Vec<(u32, String)>);

impl<'de> Deserialize<'de> for Tasks {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct ListOrMap;
        impl<'de> Visitor<'de> for ListOrMap {
            type Value = Tasks;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of addresses or a map from index to address")
            }

            fn visit_seq<S: SeqAccess<'de>>(self, mut seq: S) -> Result<Tasks, S::Error> {
                let mut tasks = Vec::new();
                while let Some(address) = seq.next_element()? {
                    tasks.push((tasks.len() as u32, address));
                }
                Ok(Tasks(tasks))
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Tasks, M::Error> {
                let mut tasks = Vec::new();
                while let Some(Index(index)) = map.next_key()? {
                    tasks.push((index, map.next_value()?));
                }
                Ok(Tasks(tasks))
            }
        }
        deserializer.deserialize_any(ListOrMap)
    }
}

/// A key of a map of tasks: a string in JSON, a number in YAML.
struct Index(u32);

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrText;
        impl Visitor<'_> for NumberOrText {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a task index from 0 to 4294967295")
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Index, E> {
                self.visit_str(&value.to_string())
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Index, E> {
                self.visit_str(&value.to_string())
            }

            fn visit_str<E: Error>(self, text: &str) -> Result<Index, E> {
                let index = parse_index(text).map(Index);
                index.ok_or_else(|| E::invalid_value(serde::de::Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(NumberOrText)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn error(text: &str) -> String {
        text.parse::<ClusterSpec>().unwrap_err().to_string()
    }

    #[test]
    fn reads_lists_and_maps() {
        let spec: ClusterSpec =
            r#"{"worker": {"7": "D:1", "3": "c:1"}, "ps": ["a:1", "b:2"]}"#.parse().unwrap();
        assert_eq!(spec.to_string(), r#"{"ps":["a:1","b:2"],"worker":{"3":"c:1","7":"d:1"}}"#);
        assert_eq!(spec.address(&TaskId::new("worker", 7)), Some("d:1"));
        assert_eq!(spec.address(&TaskId::new("worker", 0)), None);
        assert_eq!(spec.tasks("work").count(), 0);
        let all: Vec<_> = spec.all().map(|(task, _)| task.to_string()).collect();
        assert_eq!(all, ["ps:0", "ps:1", "worker:3", "worker:7"]);
        assert!(ClusterSpec::default().is_empty());
        assert_eq!(ClusterSpec::loopback(&[("ps", 2)]).to_string().matches(":0").count(), 2);
    }

    /// As the configuration file reads it: numbers as keys, beside keys that are no jobs.
    #[test]
    fn stands_beside_other_keys() {
        #[derive(serde::Deserialize)]
        struct Section {
            mode: String,
            #[serde(flatten)]
            spec: ClusterSpec,
        }
        let section: Section =
            serde_json::from_str(r#"{"worker": {"1": "a:1"}, "mode": "ps-sync"}"#).unwrap();
        assert_eq!(section.mode, "ps-sync");
        assert_eq!(section.spec.to_string(), r#"{"worker":{"1":"a:1"}}"#);
        let Index(index) =
            Index::deserialize(serde::de::value::U64Deserializer::<serde_json::Error>::new(3))
                .unwrap();
        assert_eq!(index, 3);
    }

    #[test]
    fn says_what_is_wrong() {
        let list = |jobs: &[(&str, &[&str])]| {
            let jobs = jobs.iter().map(|&(job, list)| (job, list));
            ClusterSpec::from_lists(jobs).unwrap_err().to_string()
        };
        assert_eq!(
            list(&[("ps", &["a:1"]), ("worker", &["b:1", "A:1"])]),
            "ps:0 and worker:1 have the same address a:1: is one list a copy of another?"
        );
        assert_eq!(list(&[("ps", &["a:1", ""])]), "address '' of ps:1: is empty");
        assert_eq!(list(&[("ps", &["a"])]), "address 'a' of ps:0: has no port: write host:port");
        assert_eq!(list(&[("ps", &[])]), "job ps is empty: give it addresses or leave it out");
        assert_eq!(list(&[("ps", &["a:1"]), ("ps", &["b:1"])]), "job ps is given twice");
        assert_eq!(
            list(&[("Ps", &["a:1"])]),
            "job name 'Ps' is not a lower-case letter followed by letters, digits or '_'"
        );
        let twice = ClusterSpec::from_maps([("ps", [(1, "a:1"), (1, "b:1")])]).unwrap_err();
        assert_eq!(twice.to_string(), "ps:1 is given twice");
    }

    #[test]
    fn refuses_hostile_texts() {
        assert!(error(r#"{"ps":["a:1"],"ps":["b:1"]}"#).contains("job ps is given twice"));
        assert!(error(r#"{"ps":{"0":"a:1","00":"b:1"}}"#).contains("ps:0 is given twice"));
        assert!(error(r#"{"mode":"ps-sync"}"#).starts_with(
            "no cluster: job mode: invalid type: string \"ps-sync\", expected a list of addresses \
             or a map from index to address"
        ));
        for bad in ["-1", "4294967296", "x", "", "1.0"] {
            let message = error(&format!(r#"{{"ps":{{"{bad}":"a:1"}}}}"#));
            assert!(message.contains("expected a task index"), "{message}");
        }
        for bad in ["", "[]", "3", r#"{"ps":[1]}"#, r#"{"ps":null}"#, r#"{"ps":[["a:1"]]}"#] {
            assert!(error(bad).starts_with("no cluster: "), "{bad}");
        }
    }

    type Jobs = BTreeMap<String, std::collections::BTreeSet<u32>>;

    proptest! {
        #[test]
        fn parse_undoes_print_in_any_order(
            jobs in prop::collection::btree_map(
                "[a-z][a-z0-9_]{0,5}", prop::collection::btree_set(0u32..6, 1..4), 0..4),
            seed in any::<prop::sample::Index>(),
        ) {
            let jobs: Jobs = jobs;
            let mut lists: Vec<(String, Vec<(u32, String)>)> = Vec::new();
            for (job, indices) in jobs {
                let address = |&i: &u32| (i, format!("{}-h{i}.x:{}", job.replace('_', "-"), i + 1));
                // Two jobs may differ in '_' alone; the position keeps their addresses apart.
                let at = lists.len();
                let tasks = indices.iter().map(address);
                lists.push((job.clone(), tasks.map(|(i, a)| (i, format!("j{at}.{a}"))).collect()));
            }
            let spec = ClusterSpec::from_maps(lists.clone());
            let turn = |n: usize| if n == 0 { 0 } else { seed.index(n) };
            for (_, tasks) in &mut lists {
                let n = turn(tasks.len());
                tasks.rotate_left(n);
            }
            let n = turn(lists.len());
            lists.rotate_left(n);
            prop_assert_eq!(&ClusterSpec::from_maps(lists), &spec);
            if let Ok(spec) = spec {
                prop_assert_eq!(spec.to_string().parse::<ClusterSpec>().unwrap(), spec);
            }
        }
    }
}
