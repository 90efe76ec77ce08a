//! `tftrain predict`: the classes of pictures in files.

use std::io::Read;
use std::path::Path;

use anyhow::{Result, bail};
use zune_core::bytestream::ZCursor;
use zune_core::colorspace::ColorSpace;
use zune_core::options::DecoderOptions;

use super::args::PredictArgs;
use super::exit::Usage;
use super::output::print;
use super::setup::{self, Loaded};
use crate::config::DataName;
use crate::data::{CifarSet, DataError, Pictures, load_file};
use crate::train::{Evaluator, Weights, cpu_device};

/// Prints each picture's likeliest classes.
pub(super) fn predict(args: &PredictArgs) -> Result<u8> {
    let config = setup::of_run(&args.train_dir)?.config;
    let model = setup::model(&config);
    if model.classes().is_none() {
        return Err(Usage(format!("model {} has no classes to predict", model.name())).into());
    }
    let Some(Loaded { state, metadata, .. }) = setup::newest_checkpoint(&args.train_dir)? else {
        let text = format!("no checkpoint found in {}", args.train_dir.display());
        return Err(Usage(text).into());
    };
    let set = match config.data.name {
        DataName::Cifar100 => CifarSet::Hundred,
        _ => CifarSet::Ten,
    };
    let names: Vec<String> = metadata
        .get("classes")
        .map(|names| names.split(',').map(str::to_owned).collect())
        .unwrap_or_default();
    let device = cpu_device(&config, 0, 1)?;
    let mut evaluator = Evaluator::new(&*model, &device, 1)?;
    let averaged = evaluator.set(&state, Weights::Averaged).is_ok();
    if !averaged {
        evaluator.set(&state, Weights::Raw)?;
    }

    let mut features = vec![0.0; model.features().elements()];
    for path in &args.files {
        for (label, planes) in pictures(path, set, args.records)? {
            setup::distortion(&config).plain(&planes, &mut features);
            let mut ranked: Vec<(usize, f64)> =
                evaluator.probabilities(&features)?.into_iter().enumerate().collect();
            ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
            let classes: Vec<String> = ranked
                .iter()
                .take(args.top)
                .map(|&(class, p)| format!("{} {p:.3}", name(&names, class)))
                .collect();
            print(&format!("{}{label}: {}\n", path.display(), classes.join(", ")))?;
        }
    }
    Ok(0)
}

fn name(names: &[String], class: usize) -> String {
    names.get(class).cloned().unwrap_or_else(|| format!("class_{class}"))
}

/// The pictures of a file as 32x32 planes, each with what to print behind the file's name.
fn pictures(path: &Path, set: CifarSet, limit: usize) -> Result<Vec<(String, Vec<u8>)>> {
    let read = |source| DataError::Read { path: path.to_owned(), source };
    let mut head = [0; 4];
    let _ = std::fs::File::open(path).and_then(|mut file| file.read(&mut head)).map_err(read)?;
    let bytes = || std::fs::read(path).map_err(read);
    match head {
        [0x89, b'P', b'N', b'G'] => Ok(vec![(String::new(), png(path, &bytes()?)?)]),
        [0xFF, 0xD8, ..] => Ok(vec![(String::new(), jpeg(path, &bytes()?)?)]),
        _ => {
            let file = load_file(set, path)?;
            let count = limit.min(file.len());
            Ok((0..count).map(|i| (format!("[{i}]"), file.planes(i).to_vec())).collect())
        }
    }
}

fn png(path: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let fail = |reason: String| DataError::Picture { path: path.to_owned(), reason };
    let mut decoder = png::Decoder::new(std::io::Cursor::new(bytes));
    decoder.set_transformations(png::Transformations::normalize_to_color8());
    let mut reader = decoder.read_info().map_err(|e| fail(e.to_string()))?;
    let Some(size) = reader.output_buffer_size().filter(|size| *size <= MAX_BYTES) else {
        bail!(fail("it is too large".to_owned()));
    };
    let mut pixels = vec![0; size];
    let info = reader.next_frame(&mut pixels).map_err(|e| fail(e.to_string()))?;
    let channels = info.color_type.samples();
    resized(path, &pixels, info.width as usize, info.height as usize, channels)
}

fn jpeg(path: &Path, bytes: &[u8]) -> Result<Vec<u8>> {
    let fail = |reason: String| DataError::Picture { path: path.to_owned(), reason };
    let options = DecoderOptions::default()
        .jpeg_set_out_colorspace(ColorSpace::RGB)
        .set_max_width(1 << 14)
        .set_max_height(1 << 14);
    let mut decoder = zune_jpeg::JpegDecoder::new_with_options(ZCursor::new(bytes), options);
    let pixels = decoder.decode().map_err(|e| fail(e.to_string()))?;
    let (width, height) = decoder.dimensions().ok_or_else(|| fail("it has no size".to_owned()))?;
    resized(path, &pixels, width, height, 3)
}

/// The largest picture that is decoded.
const MAX_BYTES: usize = 1 << 29;

/// Any size of picture as 32x32 planes: the middle square, each pixel the mean of what it covers.
fn resized(
    path: &Path,
    pixels: &[u8],
    width: usize,
    height: usize,
    channels: usize,
) -> Result<Vec<u8>> {
    let side = width.min(height);
    if side == 0 || pixels.len() < width * height * channels {
        let reason = "it holds no pixels".to_owned();
        bail!(DataError::Picture { path: path.to_owned(), reason });
    }
    let (left, top) = ((width - side) / 2, (height - side) / 2);
    let (rows, columns) = (Pictures::HEIGHT, Pictures::WIDTH);
    let span = |i: usize, n: usize| {
        let start = i * side / n;
        start..((i + 1) * side).div_ceil(n).max(start + 1).min(side)
    };
    let mut planes = Vec::with_capacity(Pictures::PIXELS);
    for channel in 0..Pictures::CHANNELS {
        // Grey pictures have one colour channel, perhaps with a transparency behind it.
        let channel = if channels >= 3 { channel } else { 0 };
        for row in 0..rows {
            for column in 0..columns {
                let (mut sum, mut count) = (0usize, 0usize);
                for y in span(row, rows) {
                    for x in span(column, columns) {
                        sum += pixels[((top + y) * width + left + x) * channels + channel] as usize;
                        count += 1;
                    }
                }
                planes.push(((sum + count / 2) / count) as u8);
            }
        }
    }
    Ok(planes)
}
