//! Memory that two processes on one host share: the lender fills slots of a [`Pool`], the borrower reads them through a [`Borrowed`].
//!
//! A slot goes to and fro: the lender fills it while it is free and says so by other means, the borrower frees it when it has
//! read it. Where there is no such memory, messages take another way; nothing depends on it but speed.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// Slots of a pool.
const SLOTS: usize = 16;

/// Bytes of a slot: a segment of an exchange.
const SLOT: usize = 256 << 10;

/// Bytes before the first slot: whose turn each one is, on a page of their own.
const HEAD: usize = 4096;

const BYTES: usize = HEAD + SLOTS * SLOT;

/// A slot's turn.
const FREE: u32 = 0;
const FILLED: u32 = 1;

/// Memory that the system has mapped for this process and another one.
struct Mapping {
    start: *mut u8,
    /// Stays open, so that the other process can open it by its number.
    file: File,
}

// SAFETY: the mapping belongs to no thread; who may touch which slot is agreed on through its turn.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

#[cfg(target_os = "linux")]
mod system {
    use std::fs::File;
    use std::io;

    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};

    /// A file that is nowhere but in memory and can neither shrink nor grow.
    pub(super) fn create(len: usize) -> io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("tftrain", flags)?);
        file.set_len(len as u64)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
        Ok(file)
    }

    /// Whether it is of this length, and stays so: memory that vanishes would kill its readers.
    pub(super) fn fits(file: &File, len: usize) -> io::Result<bool> {
        Ok(file.metadata()?.len() == len as u64
            && fcntl_get_seals(file)?.contains(SealFlags::SHRINK))
    }

    pub(super) fn map(file: &File, len: usize) -> io::Result<*mut u8> {
        let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        // SAFETY: the system chooses an address where nothing is yet; the file has this length.
        let start = unsafe { mmap(std::ptr::null_mut(), len, access, flags, file, 0)? };
        Ok(start.cast())
    }

    pub(super) fn unmap(start: *mut u8, len: usize) {
        // SAFETY: `map` gave exactly this, and nobody borrows from it any more. It cannot fail for a mapping that exists.
        let _ = unsafe { munmap(start.cast(), len) };
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    use std::fs::File;
    use std::io;

    pub(super) fn create(_: usize) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn fits(_: &File, _: usize) -> io::Result<bool> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn map(_: &File, _: usize) -> io::Result<*mut u8> {
        Err(io::ErrorKind::Unsupported.into())
    }

    pub(super) fn unmap(_: *mut u8, _: usize) {}
}

impl Mapping {
    fn new(file: File) -> io::Result<Self> {
        Ok(Self { start: system::map(&file, BYTES)?, file })
    }

    fn turn(&self, slot: usize) -> &AtomicU32 {
        assert!(slot < SLOTS);
        // SAFETY: inside the head, aligned, and never accessed but as an atomic.
        unsafe { &*self.start.cast::<AtomicU32>().add(slot) }
    }

    fn slot(&self, slot: usize) -> *mut u8 {
        assert!(slot < SLOTS);
        // SAFETY: inside the mapping.
        unsafe { self.start.add(HEAD + slot * SLOT) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        system::unmap(self.start, BYTES);
    }
}

/// Memory to lend: slots that one other process reads.
pub struct Pool(Mapping);

impl Pool {
    /// Free slots.
    pub fn new() -> io::Result<Self> {
        Ok(Self(Mapping::new(system::create(BYTES)?)?))
    }

    /// Where another process of this user can open it, while this one lives.
    pub fn path(&self) -> String {
        use std::os::fd::AsRawFd;
        format!("/proc/{}/fd/{}", std::process::id(), self.0.file.as_raw_fd())
    }

    /// Which memory it is, on this system. Where two processes see different ones, as in two containers, the path may lead to another.
    pub fn inode(&self) -> io::Result<u64> {
        Ok(self.0.file.metadata()?.ino())
    }

    /// Has a free slot filled, and tells which one. `None` where `len` is too much or no slot is free.
    pub fn fill(&mut self, len: usize, write: &mut dyn FnMut(&mut [u8])) -> Option<usize> {
        let free = |&slot: &usize| self.0.turn(slot).load(Ordering::Acquire) == FREE;
        let slot = (0..SLOTS).filter(|_| len <= SLOT).find(free)?;
        // SAFETY: inside the slot. A free slot is the lender's alone, and `&mut self` makes this the only borrow.
        write(unsafe { std::slice::from_raw_parts_mut(self.0.slot(slot), len) });
        self.0.turn(slot).store(FILLED, Ordering::Release);
        Some(slot)
    }
}

/// Another process's [`Pool`].
pub struct Borrowed(Arc<Mapping>);

impl Borrowed {
    /// Opens what [`Pool::path`] names, if it is what [`Pool::inode`] says.
    ///
    /// # Errors
    /// Where it is not to be had from here, is another one, or no such memory.
    pub fn open(path: &str, inode: u64) -> io::Result<Self> {
        let file = File::options().read(true).write(true).open(path)?;
        if file.metadata()?.ino() != inode || !system::fits(&file, BYTES)? {
            return Err(io::Error::other(format!("{path} is not the memory that was lent")));
        }
        Ok(Self(Arc::new(Mapping::new(file)?)))
    }

    /// The beginning of a slot that is filled, which is free again when this is dropped.
    pub fn view(&self, slot: usize, len: usize) -> Option<View> {
        let there = slot < SLOTS && len <= SLOT;
        (there && self.0.turn(slot).load(Ordering::Acquire) == FILLED).then(|| View {
            memory: self.0.clone(),
            slot,
            len,
        })
    }
}

/// What is in a slot.
pub struct View {
    memory: Arc<Mapping>,
    slot: usize,
    len: usize,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: inside the slot, which the lender leaves alone until it is free.
        unsafe { std::slice::from_raw_parts(self.memory.slot(self.slot), self.len) }
    }
}

impl Drop for View {
    fn drop(&mut self) {
        self.memory.turn(self.slot).store(FREE, Ordering::Release);
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_free_again_when_it_was_read() {
        let mut pool = Pool::new().unwrap();
        let borrowed = Borrowed::open(&pool.path(), pool.inode().unwrap()).unwrap();
        assert!(borrowed.view(0, 1).is_none(), "nothing is in it");
        let fill = |pool: &mut Pool, byte| pool.fill(1000, &mut |bytes| bytes.fill(byte));
        let views: Vec<_> = (0..SLOTS)
            .map(|i| borrowed.view(fill(&mut pool, i as u8).unwrap(), 1000).unwrap())
            .collect();
        assert_eq!(fill(&mut pool, 99), None, "no slot is free");
        for (i, view) in views.iter().enumerate() {
            assert_eq!(view.as_ref(), vec![i as u8; 1000]);
        }
        drop(views);
        let slot = fill(&mut pool, 99).unwrap();
        // What has been lent outlives the lender.
        drop(pool);
        assert_eq!(borrowed.view(slot, 1000).unwrap().as_ref(), [99; 1000]);
    }

    #[test]
    fn what_does_not_fit_is_not_taken() {
        let mut pool = Pool::new().unwrap();
        assert_eq!(pool.fill(SLOT + 1, &mut |_| {}), None);
        let slot = pool.fill(SLOT, &mut |_| {}).unwrap();
        let inode = pool.inode().unwrap();
        let borrowed = Borrowed::open(&pool.path(), inode).unwrap();
        assert!(Borrowed::open(&Pool::new().unwrap().path(), inode).is_err(), "another one");
        assert!(borrowed.view(slot, SLOT + 1).is_none() && borrowed.view(SLOTS, 1).is_none());
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_len(BYTES as u64).unwrap();
        let shrinks =
            Borrowed::open(file.path().to_str().unwrap(), file.as_file().metadata().unwrap().ino());
        assert!(shrinks.is_err(), "it could shrink");
        assert!(Borrowed::open("/proc/self/fd/9999", inode).is_err());
    }
}
