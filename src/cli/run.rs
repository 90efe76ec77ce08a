//! [`Run`]: a task that trains, from the header to the last line.
//!
//! A run lives once, or again when a parameter server died and came back: then as after `--resume`.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use anyhow::{Context, Error, Result};

use super::args::{Output, TrainArgs};
use super::cluster::{self, Worker};
use super::header::{header, placement};
use super::output::{Console, note, print};
use super::setup::{self, Loaded};
use super::watchdog::Watchdog;
use crate::cluster::Place;
use crate::config::{CheckpointFormat, Resolved, RunConfig, run_yaml};
use crate::data::Source;
use crate::io::{
    CheckpointStore, EventWriter, Format, MetricsWriter, RUN_FILE, Retention, TrainDir, checkpoint,
    write_atomic,
};
use crate::model::{Compiled, Model};
use crate::rpc::RpcError;
use crate::store::State;
use crate::train::{
    Assembly, CheckpointHook, EvalHook, Evaluator, EventsReport, Hook, LogHook, MetricsReport,
    Outcome, Part, Progress, Report, SummaryHook, Supervisor, TraceHook, Trainer, Training,
    assemble,
};
use crate::util::clock::Clock;
use crate::util::trace::Trace;

/// Lives in a row without a step between them, after which a run gives up.
const FRUITLESS_LIVES: u32 = 3;

/// Everything a run starts with.
pub(super) struct Run<'a> {
    pub(super) args: &'a TrainArgs,
    pub(super) resolved: &'a Resolved,
    pub(super) model: &'a dyn Model,
    pub(super) compiled: &'a Arc<Compiled>,
    pub(super) source: Arc<dyn Source>,
    /// How often to evaluate, and on what.
    pub(super) held_out: Option<(u64, Arc<dyn Source>)>,
    /// The chief's; others write nothing.
    pub(super) train_dir: Option<TrainDir>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) signal: Arc<AtomicUsize>,
    /// How long others are waited for.
    pub(super) rendezvous: Duration,
    /// Where it stands in a cluster, and with whom it trains.
    pub(super) fellows: Option<(&'a Place, &'a Training)>,
}

/// What is left of earlier lives.
struct Life {
    /// The checkpoint to go on from, and the examples consumed until then.
    start: Option<(State, u64)>,
    /// Whether this is not the first.
    again: bool,
}

impl Run<'_> {
    /// From the header to the last line; the value is the exit code.
    pub(super) fn go(&self) -> Result<u8> {
        let load = || {
            let batch = self.resolved.config.data.batch_size;
            self.train_dir.as_ref().map(|dir| load_start(dir.path(), batch)).transpose()
        };
        let start = if self.args.resume { load()?.flatten() } else { None };
        let progress = Arc::<Progress>::default();
        let name = self.fellows.map(|(place, _)| place.task.to_string());
        let watched = progress.clone();
        let _watchdog = Watchdog::start(name, self.args.cluster.stall_timeout, move || {
            let (moves, step, phase) = watched.now();
            (moves, format!("at step {step}, {phase}"))
        });
        let mut life = Life { start, again: false };
        let mut fruitless = 0;
        loop {
            let (before, _, _) = progress.now();
            let error = match self.live(&life, &progress) {
                Err(error) if self.may_live_again(&error) => error,
                ended => return ended,
            };
            fruitless = if progress.now().0 == before { fruitless + 1 } else { 0 };
            if fruitless == FRUITLESS_LIVES {
                return Err(error);
            }
            let name = self.fellows.map(|(place, _)| place.task.to_string()).unwrap_or_default();
            note(&format!("{name}: {error}; waiting for it to come back"));
            life = Life { start: load()?.flatten(), again: true };
        }
    }

    /// Whether an error is the loss of a parameter server, which may come back.
    fn may_live_again(&self, error: &Error) -> bool {
        let cause = error.chain().find_map(|cause| cause.downcast_ref::<RpcError>());
        match (cause, self.fellows) {
            (Some(RpcError::Lost { task, .. }), Some((_, training))) => training.ps.contains(task),
            _ => false,
        }
    }

    fn live(&self, life: &Life, progress: &Arc<Progress>) -> Result<u8> {
        let Some((place, training)) = self.fellows else {
            return self.train(life, progress, Part::alone(), None);
        };
        let (worker, part) = cluster::connect(&cluster::Start {
            config: &self.resolved.config,
            compiled: self.compiled,
            examples: self.source.len(),
            place,
            training,
            state: life.start.as_ref().map(|(state, _)| state),
            again: life.again,
            clock: &self.clock,
            signal: &self.signal,
            rendezvous: self.rendezvous,
        })?;
        let ended = self.train(life, progress, part, Some(&worker));
        match &ended {
            Ok(code) if *code > 128 => {
                let signal = format!("interrupted by signal {}", code - 128);
                worker.leave(Some((&signal, *code)));
            }
            Ok(_) => worker.leave(None),
            Err(error) if self.may_live_again(error) => {}
            Err(error) => worker.fail(error),
        }
        ended
    }

    fn train(
        &self,
        life: &Life,
        progress: &Arc<Progress>,
        part: Part,
        worker: Option<&Worker>,
    ) -> Result<u8> {
        let config = &self.resolved.config;
        let start = life.start.as_ref().map(|(state, position)| (state, *position));
        let mut assembly = assemble(config, self.compiled, &self.source, start, &self.clock, part)?;
        assembly.trainers.iter_mut().for_each(|trainer| trainer.tell(progress.clone()));
        let start_step = assembly.trainers.first().map_or(0, Trainer::global_step);
        let mut heading = header(config, self.compiled, &*self.source, &assembly);
        if self.args.log_device_placement == Some(true) {
            heading += &placement(self.compiled, &assembly);
        }
        match self.args.output {
            _ if self.train_dir.is_none() || life.again => {}
            // Nothing but objects on stdout.
            Output::Json => note(heading.trim_end()),
            Output::Tutorial | Output::Benchmark => _ = print(&heading)?,
        }
        let max_steps = config.train.max_steps;
        // Parameter servers may live at a later step than the last checkpoint.
        let saved_step = start.map_or(0, |(state, _)| state.global_step);
        if start_step >= max_steps && (self.train_dir.is_none() || saved_step >= start_step) {
            note(&format!(
                "nothing to do: the run is at step {start_step} already; raise --max-steps beyond {max_steps}"
            ));
            return Ok(0);
        }
        let classes = self.source.classes().to_vec();
        let console = Console::new(
            self.args.output,
            self.clock.clone(),
            start_step..max_steps,
            classes,
            self.signal.clone(),
            worker.map(Worker::name),
            config.train.log_every,
        );
        let mut reports: Vec<Box<dyn Report>> = vec![Box::new(console)];
        let log = LogHook::new(config.train.log_every, start_step);
        let log = if self.args.output == Output::Benchmark { log.of_all() } else { log };
        let mut hooks: Vec<Box<dyn Hook>> = vec![Box::new(log)];
        if let Some(train_dir) = &self.train_dir {
            if self.args.overwrite && !life.again {
                train_dir.clear()?;
            }
            let dir = train_dir.path();
            self.keep_records(dir, &assembly, start_step, saved_step, &mut hooks, &mut reports)?;
        }

        if let Some(dir) = self.train_dir.as_ref().filter(|_| self.args.trace_steps > 0) {
            let trace = Arc::new(Trace::new(self.clock.clone(), self.args.trace_steps));
            assembly.trainers.iter_mut().for_each(|trainer| trainer.trace(trace.clone()));
            let process = worker.map_or_else(|| "tftrain".to_owned(), Worker::name);
            hooks.push(Box::new(TraceHook::new(trace, dir.path(), process)));
        }
        let began = self.clock.monotonic();
        let supervisor = Supervisor { max_steps, hooks, reports, signal: self.signal.clone() };
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
        &self,
        dir: &Path,
        assembly: &Assembly,
        start_step: u64,
        saved_step: u64,
        hooks: &mut Vec<Box<dyn Hook>>,
        reports: &mut Vec<Box<dyn Report>>,
    ) -> Result<()> {
        let (config, clock) = (&self.resolved.config, &self.clock);
        let text = run_yaml(self.resolved);
        write_atomic(&dir.join(RUN_FILE), |file| std::io::Write::write_all(file, text.as_bytes()))?;
        hooks.push(Box::new(SummaryHook::new(config.train.summary_every, start_step)));
        let keep = &config.train.checkpoint;
        let retention =
            Retention { newest: keep.keep as usize, every_hours: keep.keep_every_hours };
        let format = match keep.format {
            CheckpointFormat::Safetensors => Format::Safetensors,
            CheckpointFormat::TensorFlow => Format::TensorFlow,
        };
        hooks.push(Box::new(CheckpointHook::new(
            CheckpointStore::open(dir, retention, clock.clone())?.with_format(format),
            metadata(config, self.compiled, self.source.classes()),
            keep.every_secs,
            keep.every_steps,
            clock.clone(),
            saved_step,
        )));
        // After the checkpoint: an evaluation that is cut short costs no step.
        if let Some((every, held_out)) = self.held_out.clone() {
            let evaluator =
                Evaluator::new(self.model, &*assembly.evaluation, config.data.batch_size)?;
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

/// The newest checkpoint of a run that is resumed, and how many examples it had consumed.
fn load_start(dir: &Path, batch: usize) -> Result<Option<(State, u64)>> {
    let Some(Loaded { path, state, metadata }) = setup::newest_checkpoint(dir)? else {
        note(&format!("{} holds no checkpoint: starting at step 0", dir.display()));
        return Ok(None);
    };
    // TensorFlow's own checkpoints do not tell it: as if every step had taken one batch.
    let by_steps = || state.global_step.checked_mul(batch as u64);
    let position = metadata
        .get("position")
        .and_then(|p| p.parse().ok())
        .or_else(|| checkpoint::bundle_prefix(&path).and_then(|_| by_steps()));
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

pub(super) fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .map_or_else(|_| "localhost".to_owned(), |name| name.trim().to_owned())
}
