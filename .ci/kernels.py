#!/usr/bin/env python3
"""Builds the GPU kernels with NVIDIA's own compilers, on a machine that needs no GPU.

    .ci/kernels.py [--write] [--folder kernels] [--requirements]

All of kernels/*.cu, with common.cuh in front as in the program, go through NVRTC 12.9 and 13.x for each architecture below, and what they
make through ptxas. Registers, shared memory and spills of each kernel are compared with kernels/registers.txt. A difference or a spill is
a failure; --write records what was found. Options that the program passes to NVRTC besides the architecture stand in kernels/options.txt,
one a line, where there are any. --requirements prints what to install (pip install --no-deps), about 200 MB.
"""
import argparse
import concurrent.futures
import ctypes as c
import difflib
import itertools
import os
import pathlib
import re
import subprocess
import sys
import sysconfig
import tempfile

REQUIREMENTS = ["nvidia-cuda-nvrtc==13.5.37", "nvidia-cuda-nvrtc-cu12==12.9.86", "nvidia-cuda-nvcc==13.5.37"]
ARCHITECTURES = [75, 80, 90, 100, 120]
COMPILERS = {"12.9": "cuda_nvrtc/lib/libnvrtc.so.12", "13.5": "cu13/lib/libnvrtc.so.13"}
PTXAS = "cu13/bin/ptxas"
ROOT = pathlib.Path(__file__).resolve().parent.parent
HEADER = """# Registers, bytes of shared memory and of spills of each kernel; written by .ci/kernels.py --write.
# Each cell: registers, with /bytes of static shared memory and !bytes of spilled stores and loads where there are any.
"""


class Failure(Exception):
    """Ends the script with its message."""


def installed(path):
    """A file of the wheels."""
    for base in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        found = pathlib.Path(base) / "nvidia" / path
        if found.exists():
            return found
    raise Failure(f"{path} is not installed here: pip install --no-deps {' '.join(REQUIREMENTS)}")


def source(folder):
    """The text that the program compiles: the shared part, then the rest."""
    shared = sorted(folder.glob("*.cuh"))
    kernels = sorted(folder.glob("*.cu"))
    if not kernels:
        raise Failure(f"no .cu files in {folder}")
    # Errors are then told by file and line.
    return "".join(f'#line 1 "{f.name}"\n{f.read_text()}\n' for f in shared + kernels)


def nvrtc(library, text, options):
    """The PTX."""
    program, length = c.c_void_p(), c.c_size_t()
    library.nvrtcCreateProgram(c.byref(program), text.encode(), b"kernels", 0, None, None)
    code = library.nvrtcCompileProgram(program, len(options), (c.c_char_p * len(options))(*[o.encode() for o in options]))
    library.nvrtcGetProgramLogSize(program, c.byref(length))
    log = c.create_string_buffer(length.value)
    library.nvrtcGetProgramLog(program, log)
    if code:
        raise Failure(f"NVRTC gives error {code} for {' '.join(options)}\n{log.value.decode()}")
    warnings = [line for line in log.value.decode().splitlines() if "warning" in line and "Architectures prior to" not in line]
    if warnings:
        raise Failure("NVRTC warns\n" + "\n".join(warnings))
    library.nvrtcGetPTXSize(program, c.byref(length))
    ptx = c.create_string_buffer(length.value)
    library.nvrtcGetPTX(program, ptx)
    library.nvrtcDestroyProgram(c.byref(program))
    return ptx.value


def assemble(ptx, architecture):
    """What ptxas says of each kernel: name -> (registers, shared bytes, bytes of spills)."""
    with tempfile.TemporaryDirectory() as work:
        path = pathlib.Path(work) / "kernels.ptx"
        path.write_bytes(ptx)
        command = [installed(PTXAS), "-v", f"-arch=sm_{architecture}", path, "-o", path.with_suffix(".cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Failure(f"ptxas refuses sm_{architecture}\n{done.stderr}")
    found, name, spills = {}, None, 0
    for line in done.stderr.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)'", line):
            name = entry[1]
        elif spill := re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line):
            spills = int(spill[1]) + int(spill[2])
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            found[name] = (int(used[1]), int(shared[1]) if shared else 0, spills)
    return found


def build(text, options, of):
    compiler, architecture = of
    library = c.CDLL(str(installed(COMPILERS[compiler])))
    return assemble(nvrtc(library, text, [f"--gpu-architecture=sm_{architecture}", *options]), architecture)


def cell(registers, shared, spills):
    return f"{registers}" + (f"/{shared}" if shared else "") + (f"!{spills}" if spills else "")


def table(results):
    """A line per kernel and compiler, a column per architecture."""
    columns = ["kernel", "NVRTC"] + [f"sm_{a}" for a in ARCHITECTURES]
    rows = [columns]
    for name in sorted({name for one in results.values() for name in one}):
        for compiler in COMPILERS:
            rows.append([name, compiler] + [cell(*results[compiler, a][name]) for a in ARCHITECTURES])
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "".join("  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() + "\n" for row in rows)


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--write", action="store_true", help="record what was found in registers.txt")
    arguments.add_argument("--folder", type=pathlib.Path, default=ROOT / "kernels", help="where the kernels are")
    arguments.add_argument("--requirements", action="store_true", help="print what to install")
    given = arguments.parse_args()
    if given.requirements:
        print(" ".join(REQUIREMENTS))
        return
    text = source(given.folder)
    more = given.folder / "options.txt"
    options = more.read_text().split() if more.exists() else []
    wanted = list(itertools.product(COMPILERS, ARCHITECTURES))
    # Processes, as NVRTC compiles one program at a time in each.
    with concurrent.futures.ProcessPoolExecutor(os.cpu_count()) as pool:
        results = dict(zip(wanted, pool.map(build, itertools.repeat(text), itertools.repeat(options), wanted)))
    found = table(results)
    print(found, end="")
    spilled = sorted({f"{name} on sm_{a} (NVRTC {v}): {spills} bytes" for (v, a), one in results.items() for name, (_, _, spills) in one.items() if spills})
    if spilled:
        raise Failure("registers are spilled\n" + "\n".join(spilled))
    recorded = given.folder / "registers.txt"
    if given.write:
        recorded.write_text(HEADER + found)
        print(f"written to {recorded}")
        return
    if not recorded.exists():
        raise Failure(f"{recorded} is not there; .ci/kernels.py --write makes it")
    old = recorded.read_text()
    if old != HEADER + found:
        difference = difflib.unified_diff(old.splitlines(), (HEADER + found).splitlines(), "recorded", "found", lineterm="", n=0)
        raise Failure(f"{recorded} says otherwise; .ci/kernels.py --write records the new state\n" + "\n".join(difference))
    print(f"{len(results[next(iter(results))])} kernels, {len(results)} builds: as recorded, no spills")


if __name__ == "__main__":
    try:
        main()
    except Failure as failure:
        sys.exit(f"kernels.py: {failure}")
