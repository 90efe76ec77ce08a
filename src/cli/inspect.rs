//! `tftrain inspect`: what is in a file.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use super::args::{InspectArgs, InspectWhat};
use super::data::cifar_set;
use super::exit::Usage;
use super::output::print;
use super::setup;
use crate::config::{Layers, run_yaml};
use crate::data::{Pictures, Split, load};
use crate::graph::{Fusions, Step, dump};
use crate::io::{Bundle, EventKind, checkpoint, read_events};
use crate::model::compile;
use crate::tensor::{HostTensor, Shape};
use crate::util::stats;

/// Dispatches.
pub(super) fn inspect(args: &InspectArgs) -> Result<u8> {
    match &args.what {
        InspectWhat::Checkpoint { path } => inspect_checkpoint(path),
        InspectWhat::Events { path } => inspect_events(path),
        InspectWhat::Dataset { path, name } => inspect_dataset(path, name),
        InspectWhat::Config { path, set } => {
            let mut layers = setup::with_file(Layers::new(None), path)?;
            for setting in set {
                layers = layers.set(setting.as_str());
            }
            print(&run_yaml(&layers.resolve()?))
        }
        InspectWhat::Model { path, batch_size } => inspect_model(path, *batch_size),
    }
}

fn inspect_checkpoint(path: &Path) -> Result<u8> {
    let path = match path.is_dir() {
        true => checkpoint::latest(path)?
            .ok_or_else(|| Usage(format!("no checkpoint found in {}", path.display())))?,
        false => path.to_owned(),
    };
    if let Some(prefix) = checkpoint::bundle_prefix(&path) {
        return inspect_bundle(&prefix);
    }
    let snapshot = checkpoint::load(&path)?;
    let mut text = format!("{}\nglobal_step: {}\n", path.display(), snapshot.global_step);
    for (key, value) in &snapshot.metadata {
        text += &format!("{key}: {value}\n");
    }
    for (name, tensor) in &snapshot.tensors {
        text += &format!("{name} {} {}\n", tensor.shape(), spread(tensor));
    }
    print(&text)
}

/// Every tensor of TensorFlow's checkpoint, whatever its type.
fn inspect_bundle(prefix: &Path) -> Result<u8> {
    let bundle = Bundle::open(prefix)?;
    let mut text = format!("{}\n", prefix.display());
    for (name, entry) in bundle.entries() {
        let shape = Shape::from(entry.shape.as_slice());
        let what = match (entry.type_name(), entry.sliced) {
            (name, true) => format!("{name}, saved in parts"),
            ("f32", false) => {
                let bytes = bundle.read(name)?;
                let floats = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
                HostTensor::f32(&entry.shape, floats.collect())
                    .map_or_else(|| "f32".to_owned(), |tensor| spread(&tensor))
            }
            ("string", false) => match bundle.read_strings(name)?.as_slice() {
                [one] => format!("string {:?}", String::from_utf8_lossy(one)),
                _ => "string".to_owned(),
            },
            (kind, false) => match (bundle.read(name)?.as_slice(), kind) {
                (&[a, b, c, d], "i32") => format!("i32 {}", i32::from_le_bytes([a, b, c, d])),
                (&[a, b, c, d, e, f, g, h], "i64") => {
                    format!("i64 {}", i64::from_le_bytes([a, b, c, d, e, f, g, h]))
                }
                _ => kind.to_owned(),
            },
        };
        text += &format!("{name} {shape} {what}\n");
    }
    print(&text)
}

/// Mean, standard deviation and extremes of a float tensor.
fn spread(tensor: &HostTensor) -> String {
    let Some(values) = tensor.as_f32() else { return "i64".to_owned() };
    let n = values.len().max(1) as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = values.iter().map(|&v| (f64::from(v) - mean).powi(2)).sum::<f64>() / n;
    let (low, high) = values
        .iter()
        .fold((f32::INFINITY, f32::NEG_INFINITY), |(low, high), &v| (low.min(v), high.max(v)));
    format!("f32 mean {mean:.6} std {:.6} min {low:.6} max {high:.6}", variance.sqrt())
}

fn inspect_events(path: &Path) -> Result<u8> {
    let mut files = vec![path.to_owned()];
    if path.is_dir() {
        let entries =
            std::fs::read_dir(path).with_context(|| format!("cannot list {}", path.display()))?;
        let is_events = |path: &PathBuf| {
            path.file_name()
                .is_some_and(|name| name.to_string_lossy().starts_with("events.out.tfevents."))
        };
        files = entries.flatten().map(|entry| entry.path()).filter(is_events).collect();
        files.sort();
        if files.is_empty() {
            return Err(Usage(format!("no event file found in {}", path.display())).into());
        }
    }
    for file in files {
        print(&format!("{}\n", file.display()))?;
        for event in read_events(&file)? {
            let event = event?;
            let what = match event.what {
                EventKind::FileVersion(version) => format!("file_version {version}"),
                EventKind::Scalar { tag, value } => format!("{tag} = {value}"),
                EventKind::Histogram { tag, histogram: h } => format!(
                    "{tag}: histogram of {} values, min {:.6}, max {:.6}, mean {:.6}",
                    h.num,
                    h.min,
                    h.max,
                    h.sum / h.num.max(1.0)
                ),
                EventKind::Image { tag, height, width, png } => {
                    format!("{tag}: picture {height}x{width}, {} bytes of PNG", png.len())
                }
                EventKind::SessionStart => "session start".to_owned(),
                EventKind::Checkpoint(path) => format!("checkpoint {path}"),
                EventKind::SessionStop => "session stop".to_owned(),
                EventKind::Other => "of another kind".to_owned(),
            };
            print(&format!("step {}: {what}\n", event.step))?;
        }
    }
    Ok(0)
}

fn inspect_dataset(dir: &Path, name: &str) -> Result<u8> {
    let set = cifar_set(name)?;
    for split in [Split::Train, Split::Test] {
        let pictures = load(set, dir, split)?;
        let mut counts = vec![0u64; pictures.classes().len()];
        let (mut sums, mut squares) = ([0u64; 3], [0u64; 3]);
        for i in 0..pictures.len() {
            counts[usize::from(pictures.label(i))] += 1;
            for (c, plane) in pictures.planes(i).chunks(Pictures::PIXELS / 3).enumerate() {
                sums[c] += plane.iter().map(|&p| u64::from(p)).sum::<u64>();
                squares[c] += plane.iter().map(|&p| u64::from(p).pow(2)).sum::<u64>();
            }
        }
        let n = (pictures.len() * Pictures::PIXELS / 3) as f64;
        let means = sums.map(|sum| sum as f64 / n);
        let stds: Vec<f64> =
            means.iter().zip(squares).map(|(m, sq)| (sq as f64 / n - m * m).sqrt()).collect();
        let mut text = format!(
            "{}: {} pictures, channel means {:.2} {:.2} {:.2}, stds {:.2} {:.2} {:.2}\n",
            pictures.name(),
            stats::count(pictures.len() as u64),
            means[0],
            means[1],
            means[2],
            stds[0],
            stds[1],
            stds[2]
        );
        for (class, count) in pictures.classes().iter().zip(counts) {
            text += &format!("  {class}: {}\n", stats::count(count));
        }
        print(&text)?;
    }
    Ok(0)
}

fn inspect_model(path: &str, batch: usize) -> Result<u8> {
    let layers = match Path::new(path).is_file() {
        true => setup::with_file(Layers::new(None), Path::new(path))?,
        false => Layers::new(Some(path)),
    };
    let model = setup::model(&layers.resolve()?.config);
    let compiled = compile(&*model, batch)?;
    let table = compiled.table();
    let mut text = format!(
        "{}: {} parameters, {}, layout {:016x}\n",
        model.name(),
        stats::count(table.parameters() as u64),
        stats::bytes(4 * table.parameters() as u64),
        table.fingerprint()
    );
    for row in table.rows() {
        text += &format!("  {} {} from {:?}\n", row.name, row.shape, row.init);
    }
    let train = compiled.train(Fusions::default());
    let sum = |of: fn(&Step) -> f64| train.steps.iter().map(of).sum::<f64>();
    text += &format!(
        "{} steps, {} of working memory at batch {batch}; {:.3} GFLOP, {} of operands and results\n",
        train.steps.len(),
        stats::bytes(4 * train.arena as u64),
        sum(Step::flops) / 1e9,
        stats::bytes(sum(Step::bytes) as u64)
    );
    text += &dump(compiled.graph());
    print(&text)
}
