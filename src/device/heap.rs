//! How the allocator and the system treat the memory of messages and slabs.

use std::mem::MaybeUninit;

/// Blocks below this many bytes, which hold messages, stay with the allocator when they are freed, so that the next message does
/// not wait for fresh pages. Larger ones, slabs and checkpoints, go back to the system at once, and leave no holes in the heap.
const KEPT: i32 = 2 << 20;

/// Free bytes at the end of the heap beyond which it shrinks.
const SPARE: i32 = 8 << 20;

/// Sets the allocator up for a task that exchanges messages. Where it is not glibc's nothing happens: its results are the same, and
/// memory is only faster or slower to get.
pub fn keep_messages() {
    #[cfg(target_env = "gnu")]
    {
        /// `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of `malloc.h`.
        const TRIM_THRESHOLD: i32 = -1;
        const MMAP_THRESHOLD: i32 = -3;
        unsafe extern "C" {
            fn mallopt(parameter: i32, value: i32) -> i32;
        }
        // SAFETY: glibc's own function with two of its own parameters; it takes the allocator's lock, and neither value touches a
        // block that exists. A refusal leaves the defaults.
        unsafe {
            mallopt(MMAP_THRESHOLD, KEPT);
            mallopt(TRIM_THRESHOLD, SPARE);
        }
    }
}

/// Bytes of a huge page, of the kind that a process need not be given beforehand.
const HUGE: usize = 2 << 20;

/// Asks for huge pages under memory that is about to be written for the first time: what walks through a large slab then waits less
/// for the translation of addresses. The system may do otherwise, and nothing but speed depends on it.
pub(super) fn huge_pages<T>(memory: &mut [MaybeUninit<T>]) {
    #[cfg(target_os = "linux")]
    {
        let pages = memory.as_mut_ptr_range();
        // Huge pages lie at multiples of their length; what is beside belongs to others.
        let start = pages.start.addr().next_multiple_of(HUGE);
        let len = (pages.end.addr() / HUGE * HUGE).saturating_sub(start);
        if len > 0 {
            let start = pages.start.with_addr(start).cast();
            // SAFETY: a range of pages inside memory that is borrowed for it. The advice changes no value of it.
            let _ = unsafe { rustix::mm::madvise(start, len, rustix::mm::Advice::LinuxHugepage) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_memory_may_be_asked_for() {
        for len in [0, 1, HUGE - 1, HUGE, 3 * HUGE + 5] {
            let mut memory: Vec<u8> = Vec::with_capacity(len);
            huge_pages(&mut memory.spare_capacity_mut()[..len]);
            memory.resize(len, 7);
            assert!(memory.iter().all(|byte| *byte == 7));
        }
    }
}
