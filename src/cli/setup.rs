//! From a configuration to its model and data.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use serde_json::json;

use super::args::TrainArgs;
use super::exit::Usage;
use super::output;
use crate::config::{
    DataConfig, DataName, Layers, ModelName, Resolved, RunConfig, all_reduce_spec,
};
use crate::data::{
    ArchiveInfo, CifarSet, DataError, Distortion, Line, Pictures, Source, Split, fetch, load,
    pictures, unpack,
};
use crate::io::{RUN_FILE, checkpoint};
use crate::model::{Cifar, Line as LineModel, Model, Resnet, ResnetVersion};
use crate::store::State;

/// Adds a configuration file.
pub(super) fn with_file(layers: Layers, path: &Path) -> Result<Layers> {
    let text = std::fs::read_to_string(path)
        .map_err(|e| Usage(format!("cannot read the configuration {}: {e}", path.display())))?;
    Ok(layers.file(path, text))
}

/// Adds what the flags say.
pub(super) fn with_flags(mut layers: Layers, args: &TrainArgs) -> Result<Layers> {
    if args.synthetic == Some(true) && args.data_dir.is_some() {
        let text = "--synthetic draws its pictures and --data-dir names a folder to read; give one of them";
        return Err(Usage(text.to_owned()).into());
    }
    let numbers = [
        ("--learning-rate", args.learning_rate),
        ("--save-secs", args.save_secs),
        ("--keep-every-hours", args.keep_every_hours),
    ];
    for (name, value) in numbers {
        if let Some(value) = value.filter(|value| !value.is_finite()) {
            return Err(Usage(format!("{name}: {value} is no finite number")).into());
        }
    }
    for set in &args.set {
        layers = layers.set(set.as_str());
    }
    let mut flag = |name: &str, key: &str, value: Option<serde_json::Value>| {
        if let Some(value) = value {
            layers = std::mem::replace(&mut layers, Layers::new(None)).flag(name, key, value);
        }
    };
    flag("--num-gpus", "towers.gpus", args.num_gpus.map(|n| json!(n)));
    let indices = (!args.gpu_indices.is_empty()).then_some(&args.gpu_indices);
    if args.num_gpus.is_none() {
        flag("--gpu-indices", "towers.gpus", indices.map(|indices| json!(indices.len())));
    }
    flag("--gpu-indices", "towers.gpu_indices", indices.map(|indices| json!(indices)));
    flag("--num-towers", "towers.cpus", args.num_towers.map(|n| json!(n)));
    flag("--batch-size", "data.batch_size", args.batch_size.map(|n| json!(n)));
    flag("--max-steps", "train.max_steps", args.max_steps.map(|n| json!(n)));
    flag("--train-dir", "train.dir", args.train_dir.as_ref().map(|dir| json!(dir)));
    let synthetic = args.synthetic.map(|on| json!(if on { "synthetic" } else { "cifar10" }));
    flag("--synthetic", "data.name", synthetic);
    flag("--data-dir", "data.dir", args.data_dir.as_ref().map(|dir| json!(dir)));
    if let Some(rate) = args.learning_rate {
        flag("--learning-rate", "optimizer.learning_rate.schedule", Some(json!("constant")));
        flag("--learning-rate", "optimizer.learning_rate.initial", Some(json!(rate)));
    }
    flag("--accumulate", "towers.accumulate", args.accumulate.map(|n| json!(n)));
    flag("--async-towers", "towers.asynchronous", args.async_towers.then(|| json!(true)));
    flag("--variables", "variables", args.variables.as_ref().map(|v| json!(v)));
    flag("--reduce", "reduce", args.reduce.as_ref().map(|v| json!(v)));
    if let Some(spec) = &args.all_reduce_spec {
        let settings =
            all_reduce_spec(spec).map_err(|why| Usage(format!("--all-reduce-spec: {why}")))?;
        settings.into_iter().for_each(|(key, value)| flag("--all-reduce-spec", key, Some(value)));
    }
    flag("--precision", "precision", args.precision.as_ref().map(|v| json!(v)));
    flag("--seed", "seed", args.seed.map(|n| json!(n)));
    flag("--threads", "towers.threads", args.threads.map(|n| json!(n)));
    flag("--input-threads", "data.threads", args.input_threads.map(|n| json!(n)));
    flag("--log-every", "train.log_every", args.log_every.map(|n| json!(n)));
    flag("--summary-every", "train.summary_every", args.summary_every.map(|n| json!(n)));
    flag("--eval-every", "train.eval_every", args.eval_every.map(|n| json!(n)));
    flag("--save-secs", "train.checkpoint.every_secs", args.save_secs.map(|n| json!(n)));
    flag("--save-steps", "train.checkpoint.every_steps", args.save_steps.map(|n| json!(n)));
    flag("--keep", "train.checkpoint.keep", args.keep.map(|n| json!(n)));
    flag(
        "--token-file",
        "cluster.token_file",
        args.cluster.token_file.as_ref().map(|file| json!(file)),
    );
    flag("--tls-ca", "cluster.tls.ca", args.cluster.tls_ca.as_ref().map(|file| json!(file)));
    flag("--tls-cert", "cluster.tls.cert", args.cluster.tls_cert.as_ref().map(|file| json!(file)));
    flag("--tls-key", "cluster.tls.key", args.cluster.tls_key.as_ref().map(|file| json!(file)));
    let hours = args.keep_every_hours.map(|n| json!(n));
    flag("--keep-every-hours", "train.checkpoint.keep_every_hours", hours);
    Ok(layers)
}

/// The configuration that a run directory was trained with. Where TensorFlow trained, there is none: the tutorial's network is assumed.
pub(super) fn of_run(dir: &Path) -> Result<Resolved> {
    let path = dir.join(RUN_FILE);
    if !path.is_file() {
        let newest = checkpoint::latest(dir).ok().flatten();
        if newest.is_some_and(|path| checkpoint::bundle_prefix(&path).is_some()) {
            return Ok(Layers::new(Some(ModelName::Cifar10.name())).resolve()?);
        }
        let text = format!("{} holds no run: there is no {RUN_FILE} in it", dir.display());
        return Err(Usage(text).into());
    }
    Ok(with_file(Layers::new(None), &path)?.resolve()?)
}

/// A checkpoint that could be read.
pub(super) struct Loaded {
    pub(super) path: PathBuf,
    pub(super) state: State,
    pub(super) metadata: BTreeMap<String, String>,
}

/// The newest checkpoint of a run that can be read; says which newer ones cannot.
pub(super) fn newest_checkpoint(dir: &Path) -> Result<Option<Loaded>> {
    let Some((path, snapshot, skipped)) = checkpoint::load_latest(dir)? else { return Ok(None) };
    for (path, error) in skipped {
        output::note(&format!("WARNING: skipped {}: {error}", path.display()));
    }
    let state = State { global_step: snapshot.global_step, tensors: snapshot.tensors };
    Ok(Some(Loaded { path, state, metadata: snapshot.metadata }))
}

/// The network of a configuration.
pub(super) fn model(config: &RunConfig) -> Arc<dyn Model> {
    let classes = if config.data.name == DataName::Cifar100 { 100 } else { 10 };
    match config.model.name {
        ModelName::Cifar10 => Arc::new(Cifar { classes, lrn: config.model.lrn.unwrap_or(true) }),
        ModelName::Resnet => Arc::new(Resnet {
            depth: config.model.depth.unwrap_or(20),
            version: match config.model.version {
                Some(2) => ResnetVersion::V2,
                _ => ResnetVersion::V1,
            },
            classes,
        }),
        ModelName::Line => Arc::new(LineModel),
    }
}

/// Held-out examples of the generated sets.
const HELD_OUT: usize = 10_000;

/// The pictures of a configuration; `None` for data that are no pictures. Fetches what is not there.
pub(super) fn load_pictures(config: &RunConfig, split: Split) -> Result<Option<Pictures>> {
    let set = match config.data.name {
        DataName::Line => return Ok(None),
        DataName::Synthetic => {
            let count = match split {
                Split::Train => examples(&config.data),
                Split::Test => HELD_OUT,
            };
            return Ok(Some(pictures(split, count, config.seed)));
        }
        DataName::Cifar10 => CifarSet::Ten,
        DataName::Cifar100 => CifarSet::Hundred,
    };
    let dir = Path::new(&config.data.dir);
    match load(set, dir, split) {
        Err(DataError::Missing { .. }) if is_absent(dir) => {
            fetch_set(set, dir, None)?;
            Ok(Some(load(set, dir, split)?))
        }
        result => Ok(Some(result?)),
    }
}

/// Whether a folder is not there, or holds nothing but an unfinished download.
fn is_absent(dir: &Path) -> bool {
    let entries = std::fs::read_dir(dir).map(|entries| {
        entries.flatten().any(|entry| !entry.file_name().to_string_lossy().contains(".tar.gz"))
    });
    !entries.unwrap_or(false)
}

/// Downloads and unpacks a CIFAR archive into `dir`, with a progress bar on a terminal.
pub(super) fn fetch_set(set: CifarSet, dir: &Path, url: Option<&str>) -> Result<PathBuf> {
    let info = ArchiveInfo::of(set);
    let url = url.unwrap_or(info.url);
    std::fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let archive = dir.join(info.file_name());
    let bar = output::transfer(info.file_name(), info.size);
    let fetched =
        fetch(url, &info.digest, info.size, &archive, &mut |done, _| bar.set_position(done));
    bar.finish_and_clear();
    fetched?;
    output::note(&format!("Successfully downloaded {} {} bytes.", info.file_name(), info.size));
    unpack(&archive, dir, info.members)?;
    Ok(dir.join(set.folder()))
}

fn examples(data: &DataConfig) -> usize {
    data.examples.unwrap_or(DataConfig::DEFAULT_EXAMPLES) as usize
}

/// The examples to learn from.
pub(super) fn training_source(config: &RunConfig) -> Result<Arc<dyn Source>> {
    Ok(match load_pictures(config, Split::Train)? {
        Some(pictures) => distortion(config).training(Arc::new(pictures), config.seed),
        None => Arc::new(Line::new(config.seed, examples(&config.data))),
    })
}

/// The examples to judge by; `None` for data without classes.
pub(super) fn evaluation_source(
    config: &RunConfig,
    split: Split,
) -> Result<Option<Arc<dyn Source>>> {
    let Some(pictures) = load_pictures(config, split)? else { return Ok(None) };
    Ok(Some(distortion(config).evaluation(Arc::new(pictures))))
}

/// How the pictures of a configuration's model become its features.
pub(super) fn distortion(config: &RunConfig) -> Distortion {
    match config.model.name {
        ModelName::Resnet => Distortion::Padded,
        ModelName::Cifar10 | ModelName::Line => Distortion::Tutorial,
    }
}
