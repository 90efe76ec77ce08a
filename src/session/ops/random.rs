//! Random numbers, with seeds the very numbers that TensorFlow draws.
//!
//! Both use Philox4x32-10. `seed` is its key and `seed2` the upper half of its counter; each run of a node sets numbers aside for
//! itself, 256 for each that it gives, so that what is drawn again and again cannot run into the next run's.

use std::f64::consts::PI;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::sync::Mutex;

use super::broadcast::extents;
use super::{Kernel, OpDef, no_kernel};
use crate::session::cancel::lock;
use crate::session::{DType, Element, Node, OpError, Tensor, tensor_elements};
use crate::util::rng::philox;

pub(super) const OPS: &[OpDef] = &[
    OpDef::new("RandomUniform", uniform),
    OpDef::new("RandomStandardNormal", normal),
    OpDef::new("TruncatedNormal", truncated),
    OpDef::new("RandomUniformInt", uniform_int),
    OpDef::new("RandomShuffle", shuffle),
];

/// Numbers that are set aside for each that is given.
const RESERVED: u128 = 256;

/// Blocks of four random words.
#[derive(Clone, Copy)]
struct Blocks {
    key: [u32; 2],
    counter: u128,
}

impl Blocks {
    fn at(&self, block: u128) -> [u32; 4] {
        let counter = self.counter.wrapping_add(block);
        philox(self.key, [0, 32, 64, 96].map(|shift| (counter >> shift) as u32))
    }
}

/// The numbers of a node, run by run.
struct Source(Mutex<Blocks>);

impl Source {
    fn of(node: &Node<'_>) -> Result<Self, OpError> {
        let mut seeds = [node.int("seed", 0)? as u64, node.int("seed2", 0)? as u64];
        if seeds == [0, 0] {
            // Not of the seed: whatever the system gives.
            seeds = [(); 2].map(|()| RandomState::new().build_hasher().finish());
        }
        let key = [seeds[0] as u32, (seeds[0] >> 32) as u32];
        Ok(Self(Mutex::new(Blocks { key, counter: u128::from(seeds[1]) << 64 })))
    }

    fn reserve(&self, count: usize) -> Blocks {
        let mut blocks = lock(&self.0);
        let own = *blocks;
        blocks.counter = blocks.counter.wrapping_add(count as u128 * RESERVED);
        own
    }
}

/// In `[0, 1)`, of 23 bits.
fn unit32(word: u32) -> f32 {
    f32::from_bits(127 << 23 | word & 0x7f_ffff) - 1.0
}

/// In `[0, 1)`, of 52 bits.
fn unit64(high: u32, low: u32) -> f64 {
    let bits = u64::from(high & 0xf_ffff) << 32 | u64::from(low);
    f64::from_bits(1023 << 52 | bits) - 1.0
}

/// Two normal numbers of two words (Box and Muller).
fn normal32(a: u32, b: u32) -> [f32; 2] {
    let radius = (-2.0 * unit32(a).max(1.0e-7).ln()).sqrt();
    let angle = (2.0 * PI * f64::from(unit32(b))) as f32;
    [angle.sin() * radius, angle.cos() * radius]
}

fn normal64(words: [u32; 4]) -> [f64; 2] {
    let [a, b, c, d] = words;
    let radius = (-2.0 * unit64(a, b).max(1.0e-7).ln()).sqrt();
    let angle = 2.0 * PI * unit64(c, d);
    [angle.sin() * radius, angle.cos() * radius]
}

/// A kernel that fills a tensor; each block gives `N` numbers.
fn fill<T: Element, const N: usize>(
    source: Source,
    draw: impl Fn(&Blocks, u128) -> [T; N] + Send + Sync + 'static,
) -> Result<Kernel, OpError> {
    Ok(Kernel::new(move |call| {
        let shape = extents(&call.tensor(0)?)?;
        let count = tensor_elements(T::DTYPE, &shape)?;
        let blocks = source.reserve(count);
        let numbers = (0..count.div_ceil(N)).flat_map(|i| draw(&blocks, i as u128)).take(count);
        let out = Tensor::new(shape, numbers.collect::<Vec<T>>())?;
        call.set(0, out);
        Ok(())
    }))
}

fn uniform(node: &Node<'_>) -> Result<Kernel, OpError> {
    let source = Source::of(node)?;
    match node.dtype("dtype")? {
        DType::F32 => fill(source, |blocks, i| blocks.at(i).map(unit32)),
        DType::F64 => fill(source, |blocks, i| {
            let [a, b, c, d] = blocks.at(i);
            [unit64(a, b), unit64(c, d)]
        }),
        other => Err(no_kernel(other)),
    }
}

fn normal(node: &Node<'_>) -> Result<Kernel, OpError> {
    let source = Source::of(node)?;
    match node.dtype("dtype")? {
        DType::F32 => fill(source, |blocks, i| {
            let [a, b, c, d] = blocks.at(i);
            let ([a, b], [c, d]) = (normal32(a, b), normal32(c, d));
            [a, b, c, d]
        }),
        DType::F64 => fill(source, |blocks, i| normal64(blocks.at(i))),
        other => Err(no_kernel(other)),
    }
}

/// Normal numbers, drawn again while outside two standard deviations. Four at a time come from 256 blocks of their own.
fn truncated(node: &Node<'_>) -> Result<Kernel, OpError> {
    fn inside<T: Copy + Default, const N: usize>(
        mut next: impl FnMut(u128) -> Vec<T>,
        keep: fn(T) -> bool,
    ) -> [T; N] {
        let mut found = [T::default(); N];
        let mut count = 0;
        for block in 0.. {
            for value in next(block).into_iter().filter(|value| keep(*value)) {
                found[count] = value;
                count += 1;
                if count == N {
                    return found;
                }
            }
        }
        found
    }
    let source = Source::of(node)?;
    match node.dtype("dtype")? {
        DType::F32 => fill(source, |blocks, i| -> [f32; 4] {
            let next = |block| {
                let [a, b, c, d] = blocks.at(i * RESERVED + block);
                [normal32(a, b), normal32(c, d)].concat()
            };
            inside(next, |x| x.abs() < 2.0)
        }),
        DType::F64 => fill(source, |blocks, i| -> [f64; 2] {
            let next = |block| normal64(blocks.at(i * RESERVED / 2 + block)).to_vec();
            inside(next, |x| x.abs() < 2.0)
        }),
        other => Err(no_kernel(other)),
    }
}

fn uniform_int(node: &Node<'_>) -> Result<Kernel, OpError> {
    let (source, dtype) = (Source::of(node)?, node.dtype("Tout")?);
    Ok(Kernel::new(move |call| {
        let shape = extents(&call.tensor(0)?)?;
        let bounds = [call.tensor(1)?.integers()?, call.tensor(2)?.integers()?].concat();
        let [low, high] = bounds[..] else {
            return Err(OpError::invalid("minval and maxval must be scalars"));
        };
        if low >= high {
            return Err(OpError::invalid(format!("Need minval < maxval, got {low} >= {high}")));
        }
        let span = high.wrapping_sub(low) as u64;
        let count = tensor_elements(dtype, &shape)?;
        let blocks = source.reserve(count);
        let block = |i: usize| blocks.at(i as u128);
        let out = match dtype {
            DType::I32 => {
                let words = (0..count.div_ceil(4)).flat_map(block).take(count);
                let numbers =
                    words.map(|word| low.wrapping_add((u64::from(word) % span) as i64) as i32);
                Tensor::new(shape, numbers.collect())?
            }
            DType::I64 => {
                let pairs = (0..count.div_ceil(2)).flat_map(|i| {
                    let [a, b, c, d] = block(i).map(u64::from);
                    [a | b << 32, c | d << 32]
                });
                let numbers = pairs.take(count).map(|pair| low.wrapping_add((pair % span) as i64));
                Tensor::new(shape, numbers.collect())?
            }
            other => return Err(no_kernel(other)),
        };
        call.set(0, out);
        Ok(())
    }))
}

/// The rows in another order (Fisher and Yates); not the order of TensorFlow.
fn shuffle(node: &Node<'_>) -> Result<Kernel, OpError> {
    let source = Source::of(node)?;
    Ok(Kernel::new(move |call| {
        let value = call.take(0)?;
        if value.shape().is_empty() || value.is_empty() {
            call.set(0, value);
            return Ok(());
        }
        let mut rows = super::parts::rows(&value)?;
        let blocks = source.reserve(rows.len());
        for i in (1..rows.len()).rev() {
            let [a, b, ..] = blocks.at(i as u128).map(u64::from);
            rows.swap(i, ((a | b << 32) % (i as u64 + 1)) as usize);
        }
        let shape = value.shape().clone();
        let row: Vec<usize> = [&[1], &shape[1..]].concat();
        let rows: Result<Vec<Tensor>, OpError> =
            rows.into_iter().map(|part| part.reshaped(row.clone())).collect();
        let out = super::parts::joined(&rows?, 0)?;
        call.set(0, out);
        Ok(())
    }))
}
