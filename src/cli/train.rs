//! `tftrain cifar10`, `line-fit` and `train`: one run from its configuration to its end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::args::{Output, TrainArgs};
use super::exit::{Refused, Usage};
use super::output::{Console, note, print};
use super::setup;
use crate::config::{
    Layers, LearningRateConfig, Origin, Resolved, RunConfig, TowerDevices, differences, run_yaml,
};
use crate::data::{Source, Split};
use crate::device::DeviceError;
use crate::device::cuda;
use crate::graph::Op;
use crate::io::{
    CheckpointStore, EventWriter, MetricsWriter, OpenMode, Retention, TrainDir, checkpoint,
    write_atomic,
};
use crate::model::{Compiled, compile};
use crate::store::State;
use crate::train::{
    Assembly, CheckpointHook, EvalHook, Evaluator, EventsReport, Hook, LogHook, MetricsReport,
    Outcome, Report, SummaryHook, Supervisor, assemble,
};
use crate::util::clock::{Clock, SystemClock};
use crate::util::stats;

/// Trains. `recipe` names the defaults; a run that is resumed goes on with its own settings beneath file and flags.
pub(super) fn train(recipe: Option<&str>, file: Option<&Path>, args: &TrainArgs) -> Result<u8> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
    let mut resolved = layered(Layers::new(recipe), file, args)?.resolve()?;
    let dir = Path::new(&resolved.config.train.dir).to_owned();
    let before = match args.resume && dir.join(setup::RUN_FILE).exists() {
        true => Some(setup::of_run(&dir)?),
        false => None,
    };
    if let Some(before) = &before {
        let model = before.config.model.name;
        if recipe.is_some_and(|recipe| recipe != model.name()) {
            let text = format!(
                "{} holds a run of model {model}; choose another --train-dir",
                dir.display()
            );
            return Err(Refused(text).into());
        }
        let beneath = setup::with_file(Layers::new(recipe), &dir.join(setup::RUN_FILE))?;
        resolved = layered(beneath, file, args)?.resolve()?;
        for (key, old, new) in differences(&before.config, &resolved.config) {
            note(&format!("resuming with a changed setting: {key} was {old}, is {new}"));
        }
    }
    place_towers(&mut resolved, args.allow_soft_placement == Some(true))?;
    let config = &resolved.config;

    let model = setup::model(config);
    let compiled = Arc::new(compile(&*model, config.data.batch_size)?);
    if config.train.eval_every.is_some() && model.classes().is_none() {
        let text = format!("--eval-every: model {} has no classes", config.model.name);
        return Err(Usage(text).into());
    }
    let mode = match (args.resume, args.overwrite) {
        (true, _) => OpenMode::Resume,
        (_, true) => OpenMode::Overwrite,
        _ => OpenMode::New,
    };
    // The directory first: nothing is read or fetched for a run that may not start.
    let train_dir = TrainDir::open(&dir, mode)?;
    let source = setup::training_source(config)?;
    let held_out = match config.train.eval_every {
        Some(every) => setup::evaluation_source(config, Split::Test)?.map(|source| (every, source)),
        None => None,
    };
    let start = if args.resume { load_start(train_dir.path(), &compiled)? } else { None };
    let from = start.as_ref().map(|(state, position)| (state, *position));
    let start_step = from.map_or(0, |(state, _)| state.global_step);
    let mut assembly = assemble(config, &compiled, &source, from, &clock)?;

    let mut heading = header(config, &compiled, &*source, &assembly);
    if args.log_device_placement == Some(true) {
        heading += &placement(&compiled, &assembly);
    }
    match args.output {
        // Nothing but objects on stdout.
        Output::Json => note(heading.trim_end()),
        Output::Tutorial | Output::Benchmark => _ = print(&heading)?,
    }
    if start_step >= config.train.max_steps {
        note(&format!(
            "nothing to do: the run is at step {start_step} already; raise --max-steps beyond {}",
            config.train.max_steps
        ));
        return Ok(0);
    }

    if args.overwrite {
        train_dir.clear()?;
    }
    let yaml = dir.join(setup::RUN_FILE);
    write_atomic(&yaml, |file| std::io::Write::write_all(file, run_yaml(&resolved).as_bytes()))?;
    let retention = Retention {
        newest: config.train.checkpoint.keep as usize,
        every_hours: config.train.checkpoint.keep_every_hours,
    };
    let store = CheckpointStore::open(&dir, retention, clock.clone())?;
    let mut hooks: Vec<Box<dyn Hook>> = vec![
        Box::new(LogHook::new(config.train.log_every, start_step)),
        Box::new(SummaryHook::new(config.train.summary_every, start_step)),
    ];
    if let Some((every, held_out)) = held_out {
        let evaluator = Evaluator::new(&*model, &*assembly.host, config.data.batch_size)?;
        hooks.push(Box::new(EvalHook::new(evaluator, held_out, every, start_step)));
    }
    hooks.push(Box::new(CheckpointHook::new(
        store,
        metadata(config, &compiled, source.classes()),
        config.train.checkpoint.every_secs,
        config.train.checkpoint.every_steps,
        clock.clone(),
        start_step,
    )));
    let host = hostname();
    let mut events = EventWriter::create(&dir, &host, clock.clone())?;
    events.session_start(start_step)?;
    let max_steps = config.train.max_steps;
    let signal = signals()?;
    let classes = source.classes().to_vec();
    let console =
        Console::new(args.output, clock.clone(), start_step..max_steps, classes, signal.clone());
    let reports: Vec<Box<dyn Report>> = vec![
        Box::new(console),
        Box::new(MetricsReport::new(MetricsWriter::open(&dir)?, start_step, clock.clone())?),
        Box::new(EventsReport::new(events, model.features())),
    ];

    let began = clock.monotonic();
    let supervisor = Supervisor { max_steps, hooks, reports, signal };
    let (outcome, trainers) = supervisor.run(std::mem::take(&mut assembly.trainers))?;
    let step = trainers.first().map_or(0, |trainer| trainer.global_step());
    let took = (clock.monotonic() - began).as_secs_f64();
    let end = match outcome {
        Outcome::Interrupted(_) => "interrupted",
        Outcome::Finished | Outcome::Failed => "done",
    };
    note(&format!("{end}: step {step} after {took:.1} s, saved in {}", dir.display()));
    Ok(match outcome {
        Outcome::Interrupted(signal) => 128 + signal as u8,
        Outcome::Finished | Outcome::Failed => 0,
    })
}

fn layered(mut layers: Layers, file: Option<&Path>, args: &TrainArgs) -> Result<Layers> {
    if let Some(path) = file {
        layers = setup::with_file(layers, path)?;
    }
    Ok(setup::with_flags(layers, args))
}

/// Answers a request for GPUs: an error, or CPU towers where that is allowed.
fn place_towers(resolved: &mut Resolved, allowed: bool) -> Result<()> {
    let TowerDevices::Gpus(asked) = resolved.config.towers.devices else { return Ok(()) };
    let reason = match cuda::probe().gpus {
        Ok(gpus) => {
            format!("{} are visible, but this version computes on the CPU only", gpus.len())
        }
        Err(reason) => format!("none is visible: {reason}"),
    };
    if !allowed {
        return Err(DeviceError::Absent {
            asked: format!("{asked} GPUs were asked for"),
            reason: format!(
                "{reason}; use --num-towers {asked} for CPU towers, or --allow-soft-placement"
            ),
        }
        .into());
    }
    note(&format!(
        "WARNING: --allow-soft-placement: {asked} GPU towers run on the CPU, since {reason}"
    ));
    resolved.config.towers.devices = TowerDevices::Cpus(asked);
    resolved.origins.remove("towers.gpus");
    let flag = Origin::Flag("--allow-soft-placement".to_owned());
    resolved.origins.insert("towers.cpus".to_owned(), flag);
    Ok(())
}

/// The newest checkpoint of a run that is resumed, and how many examples it had consumed.
fn load_start(dir: &Path, compiled: &Compiled) -> Result<Option<(State, u64)>> {
    let Some((path, snapshot, skipped)) = checkpoint::load_latest(dir)? else {
        note(&format!("{} holds no checkpoint: starting at step 0", dir.display()));
        return Ok(None);
    };
    for (path, error) in skipped {
        note(&format!("WARNING: skipped {}: {error}", path.display()));
    }
    let fingerprint = format!("{:016x}", compiled.table().fingerprint());
    if let Some(found) = snapshot.metadata.get("layout").filter(|found| **found != fingerprint) {
        tracing::warn!("layout {found} differs from the model's {fingerprint}");
    }
    let position = snapshot.metadata.get("position").and_then(|p| p.parse().ok());
    let position = position.with_context(|| {
        format!(
            "{} does not tell its data position; it was written by another program",
            path.display()
        )
    })?;
    note(&format!("resuming {} at step {}", path.display(), snapshot.global_step));
    let state = State { global_step: snapshot.global_step, tensors: snapshot.tensors };
    Ok(Some((state, position)))
}

fn metadata(
    config: &RunConfig,
    compiled: &Compiled,
    classes: &[String],
) -> BTreeMap<String, String> {
    BTreeMap::from([
        ("model".to_owned(), config.model.name.to_string()),
        ("data".to_owned(), config.data.name.to_string()),
        ("layout".to_owned(), format!("{:016x}", compiled.table().fingerprint())),
        ("seed".to_owned(), config.seed.to_string()),
        ("classes".to_owned(), classes.join(",")),
    ])
}

/// A number that becomes that of the first signal; a second signal ends the process at once, which loses nothing that
/// was saved, since files are replaced by renaming.
fn signals() -> Result<Arc<AtomicUsize>> {
    let number = Arc::new(AtomicUsize::new(0));
    let second = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        let context = || format!("cannot listen to signal {signal}");
        let code = 128 + signal;
        signal_hook::flag::register_conditional_shutdown(signal, code, second.clone())
            .with_context(context)?;
        signal_hook::flag::register(signal, second.clone()).with_context(context)?;
        signal_hook::flag::register_usize(signal, number.clone(), signal as usize)
            .with_context(context)?;
    }
    Ok(number)
}

fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}

/// What runs where, before the first step.
fn header(
    config: &RunConfig,
    compiled: &Compiled,
    source: &dyn Source,
    assembly: &Assembly,
) -> String {
    let table = compiled.table();
    let (n_towers, batch) = (assembly.towers.len(), config.data.batch_size);
    let devices: Vec<String> = assembly.towers.iter().map(ToString::to_string).collect();
    let accumulate = match config.towers.accumulate {
        1 => String::new(),
        k => format!(" x {k} micro-batches"),
    };
    let rows = [
        (
            "Model",
            format!(
                "{} ({} parameters, {})",
                config.model.name,
                stats::count(table.parameters() as u64),
                stats::bytes(4 * table.parameters() as u64)
            ),
        ),
        (
            "Data",
            format!("{} ({} training examples)", source.name(), stats::count(source.len() as u64)),
        ),
        ("Towers", format!("{n_towers} on {} ({})", devices.join(", "), assembly.host.describe())),
        ("Variables", assembly.store.to_owned()),
        ("Reduce", assembly.reducer.to_owned()),
        (
            "Batch size",
            format!("{batch} per tower{accumulate}, {} per update", assembly.global_batch),
        ),
        ("Learning rate", rate_words(config)),
        (
            "Averages",
            config
                .moving_average
                .map_or_else(|| "off".to_owned(), |decay| format!("decay {decay}")),
        ),
        ("Precision", config.precision.to_string()),
        ("Seed", config.seed.to_string()),
        ("Train dir", config.train.dir.clone()),
    ];
    rows.iter().map(|(name, value)| format!("{:15}{value}\n", format!("{name}:"))).collect()
}

fn rate_words(config: &RunConfig) -> String {
    let rate = &config.optimizer.learning_rate;
    let curve = match rate {
        LearningRateConfig::Constant { initial, .. } => format!("{initial}, constant"),
        LearningRateConfig::Exponential {
            initial,
            factor,
            epochs_per_decay,
            staircase,
            tower_blind,
            ..
        } => {
            let how = if *staircase { "in stairs" } else { "smoothly" };
            let blind = if *tower_blind { ", ignoring the number of towers" } else { "" };
            format!("{initial}, x {factor} every {epochs_per_decay} epochs {how}{blind}")
        }
        LearningRateConfig::Piecewise { values, boundaries_epochs, .. } => {
            format!("{values:?} from epochs {boundaries_epochs:?}")
        }
        LearningRateConfig::Polynomial { initial, r#final, power, epochs, .. } => {
            format!("{initial} to {final} over {epochs} epochs, power {power}")
        }
    };
    match rate.warmup_epochs() {
        0.0 => curve,
        epochs => format!("{curve}, after a warm-up of {epochs} epochs"),
    }
}

/// TensorFlow's placement log: the device mapping, then every operation with its device.
fn placement(compiled: &Compiled, assembly: &Assembly) -> String {
    let mut log = "Device mapping: no known devices.\n".to_owned();
    let is_variable = |op: &Op| matches!(op, Op::Variable { .. });
    for (i, device) in assembly.towers.iter().enumerate() {
        for (_, node) in compiled.graph().nodes() {
            let (own, op) = (&assembly.variables, node.op.name());
            match own {
                Some(shared) if is_variable(&node.op) => {
                    if i == 0 {
                        log += &format!("{}: ({op}): {shared}\n", node.name);
                    }
                }
                _ => log += &format!("tower_{i}/{}: ({op}): {device}\n", node.name),
            }
        }
    }
    let host = assembly.host.name();
    log += &format!("store: ({}): {host}\n", assembly.store);
    log += &format!("reducer: ({}): {host}\n", assembly.reducer);
    log
}
