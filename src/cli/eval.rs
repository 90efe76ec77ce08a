//! `tftrain eval`: judge a run's checkpoints, once or as they appear.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::args::{EvalArgs, EvalData, WeightsArg};
use super::exit::Usage;
use super::output::{class_table, note, precision_line, print};
use super::setup::{self, Loaded};
use crate::data::Split;
use crate::io::{EventWriter, RUN_FILE};
use crate::store::State;
use crate::train::{Evaluator, EventsReport, Happening, Report, Weights, cpu_device};
use crate::util::clock::{Clock, SystemClock};
use crate::util::cores;

/// Evaluates the newest checkpoint, or each new one.
pub(super) fn eval(args: &EvalArgs) -> Result<u8> {
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::default());
    let stop = Arc::new(AtomicBool::new(false));
    let following = args.eval_interval_secs.filter(|_| args.run_once != Some(true));
    let interval = following.map(interval).transpose()?;
    if let Some(interval) = interval {
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, stop.clone())
                .context("cannot listen to signals")?;
        }
        // The job to follow may not have begun.
        while !args.train_dir.join(RUN_FILE).exists() {
            if !wait(interval, &*clock, &stop) {
                return Ok(0);
            }
        }
    }
    if args.num_examples == Some(0) {
        return Err(Usage("--num-examples 0 leaves nothing to evaluate".to_owned()).into());
    }
    let mut config = setup::of_run(&args.train_dir)?.config;
    if let Some(dir) = &args.data_dir {
        config.data.dir = dir.to_string_lossy().into_owned();
    }
    let split = match args.eval_data {
        EvalData::Test => Split::Test,
        EvalData::TrainEval => Split::Train,
    };
    let Some(source) = setup::evaluation_source(&config, split)? else {
        return Err(Usage(format!("model {} has no classes to evaluate", config.model.name)).into());
    };
    let device = cpu_device(&config, 0, args.threads.unwrap_or_else(cores))?;
    let model = setup::model(&config);
    let mut evaluator = Evaluator::new(&*model, &device, config.data.batch_size)?;
    let mut events = match &args.eval_dir {
        Some(dir) => {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
            let writer = EventWriter::create(dir, "eval", clock.clone())?;
            Some(EventsReport::new(writer, model.features()))
        }
        None => None,
    };

    let mut seen = None;
    loop {
        match setup::newest_checkpoint(&args.train_dir)? {
            None if interval.is_none() => {
                let dir = args.train_dir.display();
                return Err(
                    Usage(format!("no checkpoint found in {dir}; has the run saved one?")).into()
                );
            }
            Some(Loaded { state, .. }) if seen != Some(state.global_step) => {
                seen = Some(state.global_step);
                for weights in judged(args.weights, &state, &mut evaluator)? {
                    let limit = args.num_examples.unwrap_or(usize::MAX);
                    let evaluation = evaluator.evaluate(&state, weights, &*source, limit)?;
                    match args.json {
                        true => print(&format!("{}\n", serde_json::to_string(&evaluation)?))?,
                        false => {
                            let line = precision_line(&evaluation, clock.wall());
                            print(&format!(
                                "{line}\n{}",
                                class_table(&evaluation, source.classes())
                            ))?
                        }
                    };
                    if let Some(events) = &mut events {
                        events.report(&Happening::Evaluation(&evaluation))?;
                    }
                }
            }
            _ => {}
        }
        let Some(interval) = interval else { return Ok(0) };
        let reached = args.until_step.is_some_and(|until| seen >= Some(until));
        if reached || !wait(interval, &*clock, &stop) {
            return Ok(0);
        }
    }
}

/// Between a tenth of a second and a day.
fn interval(secs: f64) -> Result<Duration> {
    let wrong = |error| Usage(format!("--eval-interval-secs {secs}: {error}"));
    let interval = Duration::try_from_secs_f64(secs).map_err(wrong)?;
    Ok(interval.clamp(Duration::from_millis(100), Duration::from_secs(86_400)))
}

/// Waits; `false` as soon as it shall stop.
fn wait(interval: Duration, clock: &dyn Clock, stop: &AtomicBool) -> bool {
    let until = clock.monotonic() + interval;
    while clock.monotonic() < until {
        if stop.load(Ordering::Relaxed) {
            return false;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    true
}

/// The weights to judge; raw ones, with a word, where averages were asked for but not kept.
fn judged(asked: WeightsArg, state: &State, evaluator: &mut Evaluator) -> Result<Vec<Weights>> {
    let kept = evaluator.set(state, Weights::Averaged).is_ok();
    if !kept && asked != WeightsArg::Raw {
        note("the run keeps no moving averages: evaluating the raw weights only");
    }
    Ok(match asked {
        WeightsArg::Both if kept => vec![Weights::Raw, Weights::Averaged],
        WeightsArg::Averaged if kept => vec![Weights::Averaged],
        _ => vec![Weights::Raw],
    })
}
