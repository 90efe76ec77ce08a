//! `tftrain bench`: examples per second and where a step's time goes; what tasks say to each other in bytes per second.

mod args;
mod child;
mod profile;
mod reduce;
mod rpc;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;

pub(super) use self::args::BenchArgs;
use self::args::{BenchWhat, InputBenchArgs, StepBenchArgs};
use super::args::TrainArgs;
use super::output::{note, print};
use super::setup;
use crate::config::{Layers, TowerDevices};
use crate::data::{
    Augmented, CifarSet, InputPipeline, PipelineSpec, Source, Split, load, pictures,
};
use crate::graph::Fusions;
use crate::model::compile;
use crate::train::{Diverged, Part, StepTimes, Trainer, Wanted, assemble, cpu_device};
use crate::util::clock::{Clock, SystemClock};
use crate::util::cores;
use crate::util::stats::{Speed, median};
use crate::util::trace::Trace;

/// Dispatches.
pub(super) fn bench(args: &BenchArgs) -> Result<u8> {
    match &args.what {
        BenchWhat::Step(args) => step(args),
        BenchWhat::Input(args) => input(args),
        BenchWhat::Reduce(args) => reduce::reduce(args),
        BenchWhat::Rpc(args) => rpc::rpc(args),
    }
}

/// What a benchmark without files draws: enough for the pipeline to shuffle, quick to make.
const SYNTHETIC_EXAMPLES: usize = 10_000;

fn step(args: &StepBenchArgs) -> Result<u8> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
    let flags = TrainArgs {
        num_gpus: args.num_gpus,
        num_towers: args.num_gpus.is_none().then_some(args.num_towers),
        batch_size: args.batch_size,
        threads: args.threads,
        data_dir: args.data_dir.clone(),
        synthetic: (args.data_dir.is_none() && args.model != "line").then_some(true),
        set: args.set.clone(),
        ..TrainArgs::default()
    };
    let layers = setup::with_flags(Layers::new(Some(&args.model)), &flags)?;
    let layers = match flags.synthetic {
        Some(true) => layers.flag("bench", "data.examples", json!(SYNTHETIC_EXAMPLES)),
        _ => layers,
    };
    let config = layers.resolve()?.config;
    let model = setup::model(&config);
    let compiled = Arc::new(compile(&*model, config.data.batch_size)?);
    let source = setup::training_source(&config)?;
    let mut assembly = assemble(&config, &compiled, &source, None, &clock, Part::alone())?;
    let Some(trainer) = assembly.trainers.first_mut() else { bail!("nothing to run") };
    let examples = trainer.examples_per_step();
    if !args.json {
        print(&format!(
            "Model:       {}\nDataset:     {}\nMode:        training\nBatch size:  {examples} global\n             {} per device\n\
             Num batches: {}\nDevices:     {} ({})\nVariables:   {}\nReduce:      {}\n==========\nRunning warm up\n",
            config.model.name,
            source.name(),
            config.data.batch_size,
            args.num_batches,
            assembly.towers.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "),
            assembly.tower_words,
            assembly.store,
            assembly.reducer,
        ))?;
    }
    let mut finite = true;
    let mut step =
        |trainer: &mut Trainer| match trainer.step(Wanted { losses: true, activations: false }) {
            Err(error) if error.is::<Diverged>() => {
                note(&format!("INVALID: {error}"));
                finite = false;
                Ok(None)
            }
            result => result.map(Some),
        };
    let mut warm = true;
    for _ in 0..args.num_warmup_batches {
        warm = warm && step(trainer)?.is_some();
    }
    if !args.json {
        print("Done warm up\nStep\tImg/sec\ttotal_loss\n")?;
    }
    let trace =
        Arc::new(Trace::new(clock.clone(), if args.profile { args.num_batches } else { 0 }));
    if args.profile {
        trainer.trace(trace.clone());
    }
    let (mut times, mut parts) = (Vec::new(), Vec::<StepTimes>::new());
    let start = clock.monotonic();
    let mut loss = 0.0;
    for n in 1..=args.num_batches {
        let Some(report) = (if warm { step(trainer)? } else { None }) else { break };
        trace.step();
        loss = report.loss;
        times.push(report.times.total());
        parts.push(report.times);
        if !args.json && (n == 1 || n % args.display_every.max(1) == 0) {
            let speed = Speed::of(&times, examples);
            print(&format!(
                "{n}\timages/sec: {:.1} +/- {:.1} (jitter = {:.1})\t{loss:.3}\n",
                speed.mean, speed.uncertainty, speed.jitter
            ))?;
        }
    }
    let elapsed = (clock.monotonic() - start).as_secs_f64();
    let total = (times.len() * examples) as f64 / elapsed.max(1e-9);
    let speed = Speed::of(&times, examples);
    let millis = |part: fn(&StepTimes) -> Duration| {
        median(&parts.iter().map(|t| part(t).as_secs_f64() * 1e3).collect::<Vec<_>>())
    };
    let split = [
        ("input", millis(|t| t.input)),
        ("forward-backward", millis(|t| t.compute)),
        ("reduce", millis(|t| t.reduce)),
        ("apply", millis(|t| t.apply)),
        ("step", millis(StepTimes::total)),
    ];
    let on_gpus = matches!(config.towers.devices, TowerDevices::Gpus(_));
    let fusions = if on_gpus { Fusions::default() } else { Fusions::Backward };
    let profile = args.profile.then(|| profile::rows(&compiled.train(fusions), &trace.spans()));
    let peaks = match &profile {
        // Those of a GPU stand in docs/gpu.md.
        Some(_) if !on_gpus => {
            let threads = config.towers.threads.unwrap_or_else(cores);
            Some(cpu_device(&config, 0, threads)?.peaks(&*clock))
        }
        _ => None,
    };
    if args.json {
        let split: serde_json::Map<String, serde_json::Value> =
            split.iter().map(|(name, ms)| (format!("{name}_ms"), json!(ms))).collect();
        let result = json!({
            "benchmark": "step", "valid": finite, "model": config.model.name.name(), "data": source.name(),
            "batch_size": config.data.batch_size, "global_batch": examples, "towers": assembly.towers.len(),
            "device": assembly.tower_words, "steps": times.len(), "images_per_sec": speed.mean,
            "uncertainty": speed.uncertainty, "jitter": speed.jitter, "total_images_per_sec": total,
            "loss": loss, "median": split,
            "profile": profile.map(|rows| profile::json(&rows, peaks)),
        });
        print(&format!("{result}\n"))?;
    } else {
        let rule = "-".repeat(64);
        print(&format!(
            "{rule}\ntotal images/sec: {total:.2}\n{rule}\nmedian of a step's parts, ms:"
        ))?;
        for (name, ms) in split {
            print(&format!("  {name} {ms:.3}"))?;
        }
        print("\n")?;
        if let Some(rows) = profile {
            print(&profile::table(&rows, peaks))?;
        }
    }
    Ok(if finite { 0 } else { 6 })
}

fn input(args: &InputBenchArgs) -> Result<u8> {
    let clock = SystemClock::default();
    let pictures = match &args.data_dir {
        Some(dir) => load(CifarSet::Ten, Path::new(dir), Split::Train)?,
        None => pictures(Split::Train, SYNTHETIC_EXAMPLES, 1),
    };
    let source: Arc<dyn Source> = Arc::new(Augmented::new(Arc::new(pictures), 1));
    let name = source.name().to_owned();
    let (batch, threads) = (args.batch_size as usize, args.input_threads as usize);
    let spec = PipelineSpec {
        seed: 1,
        shuffle: true,
        batch,
        position: 0,
        group: 1,
        stride: 1,
        threads,
        depth: 2 * threads,
    };
    let mut pipeline = InputPipeline::start(source, spec)?;
    let mut times = Vec::new();
    for n in 0..args.num_batches + 10 {
        let start = clock.monotonic();
        let batch = pipeline.next()?;
        pipeline.recycle(batch);
        if n >= 10 {
            times.push(clock.monotonic() - start);
        }
    }
    let total: Duration = times.iter().sum();
    let rate = (times.len() * batch) as f64 / total.as_secs_f64().max(1e-9);
    if args.json {
        let result = json!({
            "benchmark": "input", "data": name, "threads": threads, "batch_size": batch,
            "batches": times.len(), "images_per_sec": rate,
        });
        return print(&format!("{result}\n"));
    }
    print(&format!("{name}, {threads} threads: images/sec: {rate:.1}\n"))
}
