//! AMX by inline assembly: the language has no tile registers, so a block loads, uses and stores its tiles in one piece.

use super::block::Block;

/// Whether the processor multiplies bfloat16 tiles and Linux lets this process use them.
pub(super) fn permitted() -> bool {
    #[cfg(all(target_arch = "x86_64", target_os = "linux"))]
    return there() && request();
    #[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
    false
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn there() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};

    use super::super::{Isa, IsaLimit};

    const BF16: u32 = 1 << 22;
    const TILE: u32 = 1 << 24;
    // The rounding of operands and the epilogues around the tiles want AVX-512.
    Isa::detect() == Isa::Avx512
        && IsaLimit::Amx.allows()
        && __cpuid(0).eax >= 7
        && __cpuid_count(7, 0).edx & (BF16 | TILE) == BF16 | TILE
}

/// Asks Linux for the tile registers: they are large, so it saves them only for processes that do.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn request() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const XTILEDATA: u64 = 18;
    let result: i64;
    // SAFETY: a system call with two numbers; it grants or refuses (a kernel that does not know it refuses), and a
    // system call may change rcx and r11.
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") XTILEDATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

/// Palette 1: eight tiles of 64 bytes a row.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_per_row: [u16; 16],
    rows: [u8; 16],
}

/// Sets this thread's tiles up: 0 to 5, the sums and left operands, with `rows` rows, 6 and 7, the right ones, with 16.
///
/// # Safety
/// [`permitted`] has said yes.
pub(super) unsafe fn configure(rows: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let mut config = Config {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            bytes_per_row: [0; 16],
            rows: [0; 16],
        };
        config.bytes_per_row[..8].fill(64);
        config.rows[..6].fill(rows as u8);
        config.rows[6..8].fill(16);
        // SAFETY: a valid configuration of palette 1; tiles are there by the caller's promise.
        unsafe {
            std::arch::asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly));
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = rows;
}

/// Gives the tiles back: a thread that holds some is dearer to switch.
///
/// # Safety
/// As [`configure`].
pub(super) unsafe fn release() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: tiles are there by the caller's promise; no values in them are needed any more.
    unsafe {
        std::arch::asm!("tilerelease", options(nostack, nomem));
    }
}

/// The walk over the operands as the assembly reads it: distances in bytes.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
struct Walk {
    inner: usize,
    a_step: usize,
    b_step: usize,
    /// After an inner sum, from its end to the begin of the next.
    a_jump: isize,
    b_jump: isize,
}

/// The block by tile products.
///
/// # Safety
/// `configure(t.rows)` holds on this thread; operands reach as far as [`Block::check`] has checked; the sums' rows of 32 floats,
/// `out_row` floats apart, at `out` and, for two tiles, at `out_second`, are this call's.
#[cfg(target_arch = "x86_64")]
pub(super) unsafe fn multiply(t: &Block<'_>, out: *mut f32, out_row: usize, out_second: *mut f32) {
    const HALF: usize = size_of::<u16>();
    let (a_step, b_step) = (t.a_step * HALF, t.b_step * HALF);
    let walk = Walk {
        inner: t.inner,
        a_step,
        b_step,
        a_jump: (t.a_outer * HALF) as isize - (t.inner * a_step) as isize,
        b_jump: (t.b_outer * HALF) as isize - (t.inner * b_step) as isize,
    };
    /// A block of one or two left tiles: the lines that only the second one needs are the caller's.
    macro_rules! block {
        ([$($load:literal),*] [$($zero:literal),*] [$($product:literal),*] [$($jump:literal),*] [$($store:literal),*]
         $($operand:tt)*) => {
            // SAFETY: the caller's promises; only tiles and the named registers change.
            unsafe {
                std::arch::asm!(
                    "test {n}, {n}",
                    "jz 4f",
                    "tileloadd tmm0, [{c} + {cs}*1]",
                    "tileloadd tmm1, [{c} + {cs}*1 + 64]",
                    $($load,)*
                    "jmp 2f",
                    "4:",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    $($zero,)*
                    "2:",
                    "mov {n}, [{w} + {INNER}]",
                    "3:",
                    "tileloadd tmm6, [{b} + {s}*1]",
                    "tileloadd tmm4, [{a} + {ar}*1]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tileloadd tmm7, [{b2} + {s}*1]",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    $($product,)*
                    "add {a}, [{w} + {A_STEP}]",
                    "add {b}, [{w} + {B_STEP}]",
                    "add {b2}, [{w} + {B_STEP}]",
                    "dec {n}",
                    "jnz 3b",
                    "add {a}, [{w} + {A_JUMP}]",
                    "add {b}, [{w} + {B_JUMP}]",
                    "add {b2}, [{w} + {B_JUMP}]",
                    $($jump,)*
                    "dec {outer}",
                    "jnz 2b",
                    "tilestored [{c} + {cs}*1], tmm0",
                    "tilestored [{c} + {cs}*1 + 64], tmm1",
                    $($store,)*
                    n = inout(reg) usize::from(t.accumulate) => _,
                    c = in(reg) out,
                    cs = in(reg) out_row * size_of::<f32>(),
                    s = in(reg) 64usize,
                    a = inout(reg) t.a.as_ptr() => _,
                    ar = in(reg) t.row * HALF,
                    b = inout(reg) t.b.as_ptr().wrapping_add(t.panels[0]) => _,
                    b2 = inout(reg) t.b.as_ptr().wrapping_add(t.panels[1]) => _,
                    outer = inout(reg) t.outer => _,
                    w = in(reg) &raw const walk,
                    INNER = const std::mem::offset_of!(Walk, inner),
                    A_STEP = const std::mem::offset_of!(Walk, a_step),
                    B_STEP = const std::mem::offset_of!(Walk, b_step),
                    A_JUMP = const std::mem::offset_of!(Walk, a_jump),
                    B_JUMP = const std::mem::offset_of!(Walk, b_jump),
                    $($operand)*
                    options(nostack)
                );
            }
        };
    }
    match t.second {
        None => block!([] [] [] [] []),
        Some(second) => block!(
            ["tileloadd tmm2, [{c2} + {cs}*1]", "tileloadd tmm3, [{c2} + {cs}*1 + 64]"]
            ["tilezero tmm2", "tilezero tmm3"]
            ["tileloadd tmm5, [{a2} + {ar}*1]", "tdpbf16ps tmm2, tmm5, tmm6", "tdpbf16ps tmm3, tmm5, tmm7",
             "add {a2}, [{w} + {A_STEP}]"]
            ["add {a2}, [{w} + {A_JUMP}]"]
            ["tilestored [{c2} + {cs}*1], tmm2", "tilestored [{c2} + {cs}*1 + 64], tmm3"]
            c2 = in(reg) out_second,
            a2 = inout(reg) t.a.as_ptr().wrapping_add(second) => _,
        ),
    }
}
