//! How the allocator treats the blocks of messages and slabs.

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
