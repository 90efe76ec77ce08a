//! `tftrain cifar10`, `line-fit` and `train`: one run from its configuration to its end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGINT, SIGTERM};

use super::args::{EvalArgs, TrainArgs};
use super::exit::{Refused, Usage};
use super::output::note;
use super::run::Run;
use super::serve::Serve;
use super::{cluster, eval, gpus, launch, sessions, setup};
use crate::config::{Layers, Resolved, differences};
use crate::data::Split;
use crate::io::{OpenMode, RUN_FILE, TrainDir};
use crate::model::compile;
use crate::train::{Duty, duty, settle_mode};
use crate::util::clock::{Clock, SystemClock};

/// Starts a task that only serves.
pub(super) fn serve(file: Option<&Path>, args: &TrainArgs) -> Result<u8> {
    start(None, file, args, true)
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
    let soft = args.allow_soft_placement == Some(true);
    let duty = place.as_ref().map(|place| duty(&resolved.config, place)).transpose()?;
    if let (Some(place), Some(Duty::Sessions)) = (&place, &duty) {
        let gpus = gpus::for_sessions(&resolved, soft)?;
        return sessions::serve(&resolved.config, place, gpus, &args.cluster, &*clock, &signal);
    }
    if duty.as_ref().is_none_or(Duty::computes) {
        gpus::place_towers(&mut resolved, soft, place.as_ref())?;
    }
    let config = &resolved.config;
    let model = setup::model(config);
    let compiled = Arc::new(compile(&*model, config.data.batch_size)?);
    if config.train.eval_every.is_some() && model.classes().is_none() {
        let text = format!("--eval-every: model {} has no classes", config.model.name);
        return Err(Usage(text).into());
    }
    let rendezvous = Duration::from_secs(args.cluster.rendezvous_timeout);
    let mut fellows = None;
    if let (Some(place), Some(duty)) = (&place, duty) {
        place.describe(&duty.describe(&place.task)).iter().for_each(|line| note(line));
        let (compiled, clock, signal) = (&compiled, &*clock, &*signal);
        let stall_timeout = args.cluster.stall_timeout;
        let serve = Serve { config, compiled, place, clock, signal, rendezvous, stall_timeout };
        match duty {
            Duty::Variables(trainers) => return serve.parameters(&trainers),
            Duty::Towers(client) => return serve.towers(&*model, client),
            Duty::Training(training) if !only_serve => fellows = Some((place, training)),
            Duty::Evaluation if !only_serve => {
                return eval::eval(&EvalArgs::following(&config.train.dir, config.train.max_steps));
            }
            Duty::Training(_) | Duty::Evaluation | Duty::Sessions => {
                let task = &place.task;
                let text = format!("{task} serves nobody in mode {}", config.cluster.mode);
                return Err(Usage(format!("{text}; start it with `tftrain --config`")).into());
            }
        }
    } else if only_serve {
        let text = "there is no cluster to serve: give `cluster` in the configuration file, or --ps-hosts and --worker-hosts";
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
    let run = Run {
        args,
        resolved: &resolved,
        model: &*model,
        compiled: &compiled,
        source,
        held_out,
        train_dir,
        clock,
        signal,
        rendezvous,
        fellows: fellows.as_ref().map(|(place, training)| (*place, training)),
    };
    run.go()
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
    if args.data_dir.is_some() && !resolved.config.data.name.reads_files() {
        let name = resolved.config.data.name;
        let text = format!(
            "--data-dir names a folder, but data.name is {name}, which reads none; add --set data.name=cifar10"
        );
        return Err(Usage(text).into());
    }
    Ok(resolved)
}

fn layered(mut layers: Layers, file: Option<&Path>, args: &TrainArgs) -> Result<Layers> {
    if let Some(path) = file {
        layers = setup::with_file(layers, path)?;
    }
    setup::with_flags(layers, args)
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
