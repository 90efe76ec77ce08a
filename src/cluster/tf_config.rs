//! `TF_CONFIG`, the JSON in which TensorFlow tells a task its place.

use serde::Deserialize;
use serde_json::Value;

use crate::cluster::task_id::{check_job, parse_index};
use crate::cluster::{ClusterError, ClusterSpec, Found, Lookup, TaskId};

#[derive(Deserialize)]
struct TfConfig {
    cluster: Option<ClusterSpec>,
    task: Option<TfTask>,
}

#[derive(Deserialize)]
struct TfTask {
    #[serde(rename = "type")]
    job: Option<String>,
    index: Option<Value>,
}

/// What `TF_CONFIG` says, if it says anything.
pub(crate) fn tf_config(env: Lookup<'_>) -> Result<Option<Found>, ClusterError> {
    let Some(text) = env("TF_CONFIG") else { return Ok(None) };
    let wrong = |why: String| ClusterError::TfConfig(why);
    let config: TfConfig = serde_json::from_str(&text).map_err(|error| wrong(error.to_string()))?;
    let spec = config.cluster.filter(|spec| !spec.is_empty());
    let task = config.task.unwrap_or(TfTask { job: None, index: None });
    let job = task.job.filter(|job| !job.is_empty());
    let index = task.index.map(tf_index).transpose()?;
    let task = match &spec {
        None if job.is_none() && index.is_none() => return Ok(None),
        // Alone it means a local run; beside a cluster given elsewhere it is a place in that.
        None => TaskId::new(job.unwrap_or_else(|| "worker".to_owned()), index.unwrap_or(0)),
        Some(spec) => {
            spec.check_one_chief().map_err(|error| wrong(error.to_string()))?;
            // Estimators need a job `chief`; later strategies let worker 0 be it.
            if spec.chief().is_none() {
                return Err(wrong(format!(
                    "\"cluster\" must have one \"chief\" node (or worker 0), it is {spec}"
                )));
            }
            let missing = |what| wrong(format!("\"cluster\" is set, so task {what} must be set"));
            let job = job.ok_or_else(|| missing("type"))?;
            TaskId::new(job, index.ok_or_else(|| missing("index"))?)
        }
    };
    check_job(&task.job).map_err(|error| wrong(error.to_string()))?;
    Ok(Some(Found { source: "TF_CONFIG", spec, task: Some(task), world: None, local_rank: None }))
}

/// A whole number, or as TensorFlow allows the text of one.
fn tf_index(value: Value) -> Result<u32, ClusterError> {
    let text = match &value {
        Value::Number(number) => number.to_string(),
        Value::String(text) => text.clone(),
        _ => String::new(),
    };
    parse_index(&text).ok_or_else(|| {
        let why = if text.starts_with('-') { "a non-negative number" } else { "a whole number" };
        ClusterError::TfConfig(format!("task index {value} must be {why} up to {}", u32::MAX))
    })
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

    /// Task and addresses.
    fn place(found: &Found) -> String {
        let text = |x: Option<String>| x.unwrap_or_else(|| "-".to_owned());
        let task = text(found.task.as_ref().map(ToString::to_string));
        format!("{task} {}", text(found.spec.as_ref().map(ToString::to_string)))
    }

    fn tf(text: &str) -> Result<String, String> {
        read(&[("TF_CONFIG", text)]).map(|found| found.iter().map(place).collect())
    }

    #[test]
    fn reads_tf_config() {
        let cluster = r#"{"chief":["h0:1"],"ps":["h1:1"],"worker":["h3:1","h4:1"]}"#;
        for (task, want) in [
            (r#"{"type":"worker","index":1}"#, "worker:1"),
            (r#"{"type":"chief","index":"0"}"#, "chief:0"),
            (r#"{"type":"evaluator","index":4294967295}"#, "evaluator:4294967295"),
        ] {
            let text = format!(
                r#"{{"cluster":{cluster},"task":{task},"environment":"cloud","model_dir":"x"}}"#
            );
            assert_eq!(tf(&text), Ok(format!("{want} {cluster}")));
        }
        for cluster in [
            r#"{"master":["a:1"]}"#,
            r#"{"worker":["a:1"]}"#,
            r#"{"chief":["a:1"],"evaluator":["b:1"]}"#,
        ] {
            let text =
                format!(r#"{{"cluster":{cluster},"task":{{"type":"evaluator","index":0}}}}"#);
            assert_eq!(tf(&text), Ok(format!("evaluator:0 {cluster}")));
        }
        assert_eq!(tf(r#"{"task":{"type":"ps","index":1}}"#), Ok("ps:1 -".to_owned()));
        assert_eq!(tf(r#"{"cluster":{},"task":{"index":0}}"#), Ok("worker:0 -".to_owned()));
        for nothing in ["", " ", "{}", r#"{"environment":"local","task":{}}"#] {
            assert_eq!(read(&[("TF_CONFIG", nothing)]), Ok(Vec::new()));
        }
    }

    #[test]
    fn says_what_is_wrong_with_tf_config() {
        let with = |cluster: &str, task: &str| {
            tf(&format!(r#"{{"cluster":{cluster},"task":{task}}}"#)).unwrap_err()
        };
        let (good, task) = (r#"{"chief":["a:1"]}"#, r#"{"type":"chief","index":0}"#);
        assert_eq!(
            with(r#"{"ps":["a:1"]}"#, task),
            r#"TF_CONFIG: "cluster" must have one "chief" node (or worker 0), it is {"ps":["a:1"]}"#
        );
        assert_eq!(
            with(r#"{"chief":["a:1","b:1"]}"#, task),
            r#"TF_CONFIG: the cluster must have only one "chief" node, it has chief:0, chief:1"#
        );
        assert_eq!(with(good, "{}"), r#"TF_CONFIG: "cluster" is set, so task type must be set"#);
        assert_eq!(with(good, "null"), r#"TF_CONFIG: "cluster" is set, so task type must be set"#);
        assert_eq!(
            with(good, r#"{"type":"chief"}"#),
            r#"TF_CONFIG: "cluster" is set, so task index must be set"#
        );
        for (index, why) in [
            ("-1", "-1 must be a non-negative number up to 4294967295"),
            ("4294967296", "4294967296 must be a whole number up to 4294967295"),
            ("1.5", "1.5 must be a whole number up to 4294967295"),
            ("\"one\"", "\"one\" must be a whole number up to 4294967295"),
            ("[0]", "[0] must be a whole number up to 4294967295"),
        ] {
            let message = with(good, &format!(r#"{{"type":"chief","index":{index}}}"#));
            assert_eq!(message, format!("TF_CONFIG: task index {why}"));
        }
        assert_eq!(
            tf("{cluster}").unwrap_err(),
            "TF_CONFIG: key must be a string at line 1 column 2"
        );
        for (cluster, part) in [
            (r#"{"worker":[]}"#, "job worker is empty"),
            (r#"{"worker":["a:1"],"worker":["b:1"]}"#, "job worker is given twice"),
            (r#"{"chief":["a:1"],"ps":["a:1"]}"#, "chief:0 and ps:0 have the same address a:1"),
            (r#"{"chief":["a"]}"#, "address 'a' of chief:0: has no port"),
            (r#"["a:1"]"#, "expected a map from job to addresses"),
        ] {
            let message = with(cluster, task);
            assert!(message.starts_with("TF_CONFIG: ") && message.contains(part), "{message}");
        }
        let twice = r#"{"cluster":{"chief":["a:1"]},"cluster":{"chief":["b:1"]}}"#;
        assert!(tf(twice).unwrap_err().contains("duplicate field `cluster`"));
        assert!(tf(r#"{"task":{"type":"A b"}}"#).unwrap_err().contains("job name 'A b'"));
        assert!(tf("[[[").unwrap_err().starts_with("TF_CONFIG: "));
    }
}
