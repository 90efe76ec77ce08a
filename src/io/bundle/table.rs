//! The sorted table of keys and values that LevelDB and TensorFlow write: blocks of prefix-compressed entries, an index of
//! the blocks, and a footer that leads to the index.
//!
//! ```text
//! block  = (shared u | unshared u | value length u | key tail | value)* restart u32* restarts u32 | kind u8 | masked crc u32
//! footer = handle of the meta index | handle of the index | padding to 40 bytes | magic u64
//! handle = offset u | size u                                    (u: varint)
//! ```

use crate::io::record::masked_crc;

const MAGIC: u64 = 0xdb47_7524_8b80_fb57;
const FOOTER: usize = 48;
/// The kind of the block and its checksum.
const TRAILER: usize = 5;
/// A block is closed when it holds so many bytes, as in TensorFlow.
const BLOCK_SIZE: usize = 256 << 10;
/// Every so many entries a key is written whole.
const RESTART_INTERVAL: usize = 16;

/// Keys and their values.
pub(super) type Entries = Vec<(Vec<u8>, Vec<u8>)>;

/// Appends `value`, seven bits a byte, low bits first.
pub(super) fn put_varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Takes a varint off the front of `input`.
pub(super) fn take_varint(input: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = input.split_first()?;
        *input = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// Takes `length` bytes off the front of `input`.
fn take<'a>(input: &mut &'a [u8], length: u64) -> Option<&'a [u8]> {
    let (head, rest) = input.split_at_checked(usize::try_from(length).ok()?)?;
    *input = rest;
    Some(head)
}

/// A block under construction.
#[derive(Default)]
struct Block {
    bytes: Vec<u8>,
    restarts: Vec<u32>,
    entries: usize,
    last: Vec<u8>,
}

impl Block {
    fn put(&mut self, key: &[u8], value: &[u8]) {
        let whole = self.entries.is_multiple_of(RESTART_INTERVAL);
        let shared = match whole {
            true => 0,
            false => self.last.iter().zip(key).take_while(|(a, b)| a == b).count(),
        };
        if whole {
            self.restarts.push(self.bytes.len() as u32);
        }
        put_varint(&mut self.bytes, shared as u64);
        put_varint(&mut self.bytes, (key.len() - shared) as u64);
        put_varint(&mut self.bytes, value.len() as u64);
        self.bytes.extend_from_slice(&key[shared..]);
        self.bytes.extend_from_slice(value);
        self.last = key.to_vec();
        self.entries += 1;
    }

    /// Appends the block to `file` and returns its handle.
    fn close(&mut self, file: &mut Vec<u8>) -> Vec<u8> {
        let mut block = std::mem::take(self);
        // A block without entries has its one restart all the same.
        if block.restarts.is_empty() {
            block.restarts.push(0);
        }
        block.restarts.iter().for_each(|at| block.bytes.extend(at.to_le_bytes()));
        block.bytes.extend((block.restarts.len() as u32).to_le_bytes());
        let mut handle = Vec::new();
        put_varint(&mut handle, file.len() as u64);
        put_varint(&mut handle, block.bytes.len() as u64);
        block.bytes.push(0);
        let crc = masked_crc(&block.bytes);
        file.extend(block.bytes);
        file.extend(crc.to_le_bytes());
        handle
    }
}

/// The file of a table; keys must ascend.
pub(super) fn encode<'a>(entries: impl IntoIterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let (mut file, mut block, mut index) = (Vec::new(), Block::default(), Block::default());
    for (key, value) in entries {
        block.put(key, value);
        if block.bytes.len() >= BLOCK_SIZE {
            let handle = block.close(&mut file);
            index.put(key, &handle);
        }
    }
    if block.entries > 0 {
        let successor = successor(&block.last);
        let handle = block.close(&mut file);
        index.put(&successor, &handle);
    }
    let mut footer = Block::default().close(&mut file);
    footer.extend(index.close(&mut file));
    footer.resize(FOOTER - size_of::<u64>(), 0);
    file.extend(footer);
    file.extend(MAGIC.to_le_bytes());
    file
}

/// A short key that does not come before `key`.
fn successor(key: &[u8]) -> Vec<u8> {
    match key.iter().position(|&byte| byte != u8::MAX) {
        Some(at) => [&key[..at], &[key[at] + 1]].concat(),
        None => key.to_vec(),
    }
}

/// All entries of a table's file, in its order.
pub(super) fn decode(file: &[u8]) -> Result<Entries, String> {
    let footer_at = file.len().checked_sub(FOOTER).ok_or("it is too short for a table")?;
    let (blocks, footer) = file.split_at(footer_at);
    let (mut handles, magic) = footer.split_at(FOOTER - size_of::<u64>());
    if magic != MAGIC.to_le_bytes() {
        return Err(
            "it does not end as a table does: it is cut short, or no index of a checkpoint"
                .to_owned(),
        );
    }
    let handles = &mut handles;
    let mut handle = || Some((take_varint(handles)?, take_varint(handles)?));
    let (_meta, index) = (handle(), handle());
    let index = index.ok_or("its footer holds no handle of an index")?;
    let mut entries = Entries::new();
    let mut total = 0;
    for (_, handle) in block_entries(blocks, index)? {
        let handle = &mut handle.as_slice();
        let (Some(offset), Some(size)) = (take_varint(handle), take_varint(handle)) else {
            return Err("its index holds no handle of a block".to_owned());
        };
        // Blocks do not overlap; a file that names one again and again would grow without limit.
        total += size;
        if total > blocks.len() as u64 {
            return Err("its blocks overlap".to_owned());
        }
        entries.extend(block_entries(blocks, (offset, size))?);
    }
    match entries.is_sorted_by(|a, b| a.0 < b.0) {
        true => Ok(entries),
        false => Err("its keys are not in order".to_owned()),
    }
}

/// The entries of one block, checked.
fn block_entries(file: &[u8], (offset, size): (u64, u64)) -> Result<Entries, String> {
    let outside = || format!("a block of {size} bytes at {offset} lies outside the file");
    let start = usize::try_from(offset).map_err(|_| outside())?;
    let size_usize = usize::try_from(size).map_err(|_| outside())?;
    let end = start.checked_add(size_usize).filter(|end| *end <= file.len()).ok_or_else(outside)?;
    let trailed =
        end.checked_add(TRAILER).and_then(|to| file.get(start..to)).ok_or_else(outside)?;
    let (content, crc) = trailed.split_at(size_usize + 1);
    if crc != masked_crc(content).to_le_bytes() {
        return Err(format!("the checksum of the block at {offset} is wrong"));
    }
    let (kind, content) = content.split_last().ok_or_else(outside)?;
    match kind {
        0 => {}
        1 => {
            return Err(format!(
                "the block at {offset} is compressed by snappy, which is not read"
            ));
        }
        other => return Err(format!("the block at {offset} is of unknown kind {other}")),
    }
    entries_of(content).ok_or_else(|| format!("the entries of the block at {offset} do not fit it"))
}

fn entries_of(content: &[u8]) -> Option<Entries> {
    let (rest, restarts) = content.split_last_chunk::<4>()?;
    let restarts = u64::from(u32::from_le_bytes(*restarts)) * 4;
    let mut input = rest.get(..rest.len().checked_sub(usize::try_from(restarts).ok()?)?)?;
    let mut entries = Vec::new();
    let (mut key, mut bytes) = (Vec::new(), 0u64);
    while !input.is_empty() {
        let input = &mut input;
        let (shared, tail, length) =
            (take_varint(input)?, take_varint(input)?, take_varint(input)?);
        if shared > key.len() as u64 {
            return None;
        }
        key.truncate(shared as usize);
        key.extend_from_slice(take(input, tail)?);
        // Shared prefixes let a small block unfold into a large one: no honest file comes near this.
        bytes += key.len() as u64;
        if bytes > (64 << 20) + 256 * content.len() as u64 {
            return None;
        }
        entries.push((key.clone(), take(input, length)?.to_vec()));
    }
    Some(entries)
}
