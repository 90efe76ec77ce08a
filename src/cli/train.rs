//! `tftrain cifar10`, `line-fit` and `train`: one run from its configuration to its end.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::args::{EvalArgs, Output, TrainArgs};
use super::cluster::{self, Worker};
use super::exit::{Refused, Usage};
use super::header::{header, placement};
use super::output::{Console, note, print};
use super::serve::Serve;
use super::setup::{self, Loaded};
use super::{eval, launch};
use crate::config::{Layers, Origin, Resolved, RunConfig, TowerDevices, differences, run_yaml};
use crate::data::{Source, Split};
use crate::device::DeviceError;
use crate::device::cuda;
use crate::io::{
    CheckpointStore, EventWriter, MetricsWriter, OpenMode, RUN_FILE, Retention, TrainDir,
    write_atomic,
};
use crate::model::{Compiled, Model, compile};
use crate::store::State;
use crate::train::{
    Assembly, CheckpointHook, Duty, EvalHook, Evaluator, EventsReport, Hook, LogHook,
    MetricsReport, Outcome, Part, Report, SummaryHook, Supervisor, Trainer, assemble, duty,
    settle_mode,
};
use crate::util::clock::{Clock, SystemClock};

/// Starts a task that only serves.
pub(super) fn serve(file: &Path, args: &TrainArgs) -> Result<u8> {
    start(None, Some(file), args, true)
}

/// Trains, or serves where this process is a task that does.
pub(super) fn train(recipe: Option<&str>, file: Option<&Path>, args: &TrainArgs) -> Result<u8> {
    start(recipe, file, args, false)
}

fn start(
    recipe: Option<&str>,
    file: Option<&Path>,
    args: &TrainArgs,
    only_serve: bool,
) -> Result<u8> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
    let signal = signals()?;
    launch::end_with_launcher(&signal);
    let mut resolved = configure(recipe, file, args)?;
    let place = cluster::place(&resolved.config, args)?;
    if let Some(place) = &place {
        settle_mode(&mut resolved, &place.spec);
    }
    let config = &resolved.config;
    let model = setup::model(config);
    let compiled = Arc::new(compile(&*model, config.data.batch_size)?);
    if config.train.eval_every.is_some() && model.classes().is_none() {
        let text = format!("--eval-every: model {} has no classes", config.model.name);
        return Err(Usage(text).into());
    }
    let rendezvous = Duration::from_secs(args.rendezvous_timeout);
    let mut fellows = None;
    if let Some(place) = &place {
        let duty = duty(config, place)?;
        place.describe(&duty.describe(&place.task)).iter().for_each(|line| note(line));
        let (compiled, clock, signal) = (&compiled, &*clock, &*signal);
        let serve = Serve { config, compiled, place, clock, signal, rendezvous };
        match duty {
            Duty::Variables(trainers) => return serve.parameters(&trainers),
            Duty::Towers(client) => return serve.towers(&*model, client),
            Duty::Training(training) if !only_serve => fellows = Some((place, training)),
            Duty::Evaluation if !only_serve => {
                return eval::eval(&EvalArgs::following(&config.train.dir, config.train.max_steps));
            }
            Duty::Training(_) | Duty::Evaluation => {
                let task = &place.task;
                let text = format!("{task} serves nobody in mode {}", config.cluster.mode);
                return Err(Usage(format!("{text}; start it with `tftrain --config`")).into());
            }
        }
    } else if only_serve {
        let text = "there is no cluster to serve: give `cluster` in the configuration file";
        return Err(Usage(text.to_owned()).into());
    }
    let is_chief = fellows.as_ref().is_none_or(|(place, training)| training.chief == place.task);

    if args.resume && args.overwrite {
        let text = "--resume goes on with a run and --overwrite replaces it; give one of them";
        return Err(Usage(text.to_owned()).into());
    }
    let mode = match (args.resume, args.overwrite) {
        (true, _) => OpenMode::Resume,
        (_, true) => OpenMode::Overwrite,
        _ => OpenMode::New,
    };
    // The directory first: nothing is read or fetched for a run that may not start. The chief's alone.
    let dir = Path::new(&config.train.dir);
    let train_dir = is_chief.then(|| TrainDir::open(dir, mode)).transpose()?;
    let source = setup::training_source(config)?;
    let held_out = match config.train.eval_every {
        Some(every) if is_chief => {
            setup::evaluation_source(config, Split::Test)?.map(|source| (every, source))
        }
        _ => None,
    };
    let start = match &train_dir {
        Some(dir) if args.resume => load_start(dir.path())?,
        _ => None,
    };
    let state = start.as_ref().map(|(state, _)| state);
    let (worker, part) = match &fellows {
        Some((place, training)) => {
            let (worker, part) = cluster::connect(&cluster::Start {
                config,
                compiled: &compiled,
                examples: source.len(),
                place,
                training,
                state,
                clock: &clock,
                signal: &signal,
                rendezvous,
            })?;
            (Some(worker), part)
        }
        None => (None, Part::alone()),
    };
    let name = worker.as_ref().map(Worker::name);
    let run = Run {
        args,
        resolved,
        model,
        compiled,
        source,
        held_out,
        train_dir,
        start,
        clock,
        signal,
        name,
    };
    let ended = run.go(part);
    if let Some(worker) = worker {
        match &ended {
            Ok(code) if *code > 128 => {
                let signal = format!("interrupted by signal {}", code - 128);
                worker.leave(Some((&signal, *code)));
            }
            Ok(_) => worker.leave(None),
            Err(error) => worker.fail(error),
        }
    }
    ended
}

/// The settings of a run: the recipe's, then those of the run that is resumed, then file and flags.
fn configure(recipe: Option<&str>, file: Option<&Path>, args: &TrainArgs) -> Result<Resolved> {
    let mut resolved = layered(Layers::new(recipe), file, args)?.resolve()?;
    let dir = Path::new(&resolved.config.train.dir).to_owned();
    if args.resume && dir.join(RUN_FILE).exists() {
        let before = setup::of_run(&dir)?;
        let model = before.config.model.name;
        if recipe.is_some_and(|recipe| recipe != model.name()) {
            let text = format!(
                "{} holds a run of model {model}; choose another --train-dir",
                dir.display()
            );
            return Err(Refused(text).into());
        }
        let beneath = setup::with_file(Layers::new(recipe), &dir.join(RUN_FILE))?;
        resolved = layered(beneath, file, args)?.resolve()?;
        for (key, old, new) in differences(&before.config, &resolved.config) {
            note(&format!("resuming with a changed setting: {key} was {old}, is {new}"));
        }
    }
    place_towers(&mut resolved, args.allow_soft_placement == Some(true))?;
    Ok(resolved)
}

/// Everything a run starts with.
struct Run<'a> {
    args: &'a TrainArgs,
    resolved: Resolved,
    model: Arc<dyn Model>,
    compiled: Arc<Compiled>,
    source: Arc<dyn Source>,
    /// How often to evaluate, and on what.
    held_out: Option<(u64, Arc<dyn Source>)>,
    /// The chief's; others write nothing.
    train_dir: Option<TrainDir>,
    start: Option<(State, u64)>,
    clock: Arc<dyn Clock>,
    signal: Arc<AtomicUsize>,
    /// This task's name in a cluster.
    name: Option<String>,
}

impl Run<'_> {
    /// From the header to the last line; the value is the exit code.
    fn go(mut self, part: Part) -> Result<u8> {
        let config = &self.resolved.config.clone();
        let start = self.start.as_ref().map(|(state, position)| (state, *position));
        let mut assembly =
            assemble(config, &self.compiled, &self.source, start, &self.clock, part)?;
        let start_step = assembly.trainers.first().map_or(0, Trainer::global_step);
        let mut heading = header(config, &self.compiled, &*self.source, &assembly);
        if self.args.log_device_placement == Some(true) {
            heading += &placement(&self.compiled, &assembly);
        }
        match self.args.output {
            _ if self.train_dir.is_none() => {}
            // Nothing but objects on stdout.
            Output::Json => note(heading.trim_end()),
            Output::Tutorial | Output::Benchmark => _ = print(&heading)?,
        }
        let max_steps = config.train.max_steps;
        // Parameter servers may live at a later step than the last checkpoint.
        let saved_step = self.start.as_ref().map_or(0, |(state, _)| state.global_step);
        if start_step >= max_steps && (self.train_dir.is_none() || saved_step >= start_step) {
            note(&format!(
                "nothing to do: the run is at step {start_step} already; raise --max-steps beyond {max_steps}"
            ));
            return Ok(0);
        }
        let classes = self.source.classes().to_vec();
        let steps = start_step..max_steps;
        let (clock, signal) = (self.clock.clone(), self.signal.clone());
        let console = Console::new(
            self.args.output,
            clock,
            steps,
            classes,
            signal.clone(),
            self.name.take(),
            config.train.log_every,
        );
        let mut reports: Vec<Box<dyn Report>> = vec![Box::new(console)];
        let mut hooks: Vec<Box<dyn Hook>> =
            vec![Box::new(LogHook::new(config.train.log_every, start_step))];
        self.keep_records(&assembly, start_step, saved_step, &mut hooks, &mut reports)?;

        let began = self.clock.monotonic();
        let supervisor = Supervisor { max_steps, hooks, reports, signal };
        let (outcome, trainers) = supervisor.run(std::mem::take(&mut assembly.trainers))?;
        let step = trainers.first().map_or(0, Trainer::global_step);
        let took = (self.clock.monotonic() - began).as_secs_f64();
        let end = match outcome {
            Outcome::Interrupted(_) => "interrupted",
            Outcome::Finished | Outcome::Failed => "done",
        };
        let saved =
            self.train_dir.as_ref().map(|dir| format!(", saved in {}", dir.path().display()));
        note(&format!("{end}: step {step} after {took:.1} s{}", saved.unwrap_or_default()));
        Ok(match outcome {
            Outcome::Interrupted(signal) => 128 + signal as u8,
            Outcome::Finished | Outcome::Failed => 0,
        })
    }

    /// What the chief writes: configuration, summaries, evaluations, checkpoints, metrics.
    fn keep_records(
        &mut self,
        assembly: &Assembly,
        start_step: u64,
        saved_step: u64,
        hooks: &mut Vec<Box<dyn Hook>>,
        reports: &mut Vec<Box<dyn Report>>,
    ) -> Result<()> {
        let Some(train_dir) = &self.train_dir else { return Ok(()) };
        let config = &self.resolved.config;
        if self.args.overwrite {
            train_dir.clear()?;
        }
        let (dir, clock) = (train_dir.path(), &self.clock);
        let text = run_yaml(&self.resolved);
        write_atomic(&dir.join(RUN_FILE), |file| std::io::Write::write_all(file, text.as_bytes()))?;
        hooks.push(Box::new(SummaryHook::new(config.train.summary_every, start_step)));
        let keep = &config.train.checkpoint;
        let retention =
            Retention { newest: keep.keep as usize, every_hours: keep.keep_every_hours };
        hooks.push(Box::new(CheckpointHook::new(
            CheckpointStore::open(dir, retention, clock.clone())?,
            metadata(config, &self.compiled, self.source.classes()),
            keep.every_secs,
            keep.every_steps,
            clock.clone(),
            saved_step,
        )));
        // After the checkpoint: an evaluation that is cut short costs no step.
        if let Some((every, held_out)) = self.held_out.take() {
            let evaluator = Evaluator::new(&*self.model, &*assembly.host, config.data.batch_size)?;
            hooks.push(Box::new(EvalHook::new(evaluator, held_out, every, start_step)));
        }
        let mut events = EventWriter::create(dir, &hostname(), clock.clone())?;
        events.session_start(start_step)?;
        let metrics = MetricsWriter::open(dir)?;
        reports.push(Box::new(MetricsReport::new(metrics, start_step, clock.clone())?));
        reports.push(Box::new(EventsReport::new(events, self.model.features())));
        Ok(())
    }
}

fn layered(mut layers: Layers, file: Option<&Path>, args: &TrainArgs) -> Result<Layers> {
    if let Some(path) = file {
        layers = setup::with_file(layers, path)?;
    }
    setup::with_flags(layers, args)
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
fn load_start(dir: &Path) -> Result<Option<(State, u64)>> {
    let Some(Loaded { path, state, metadata }) = setup::newest_checkpoint(dir)? else {
        note(&format!("{} holds no checkpoint: starting at step 0", dir.display()));
        return Ok(None);
    };
    let position = metadata.get("position").and_then(|p| p.parse().ok());
    let position = position.with_context(|| {
        format!(
            "{} does not tell its data position; it was written by another program",
            path.display()
        )
    })?;
    note(&format!("resuming {} at step {}", path.display(), state.global_step));
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
pub(super) fn signals() -> Result<Arc<AtomicUsize>> {
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
